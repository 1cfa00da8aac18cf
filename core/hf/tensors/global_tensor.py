"""Build one tensor of the global Megatron form of the Hugging Face tensors that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.errors import CorruptError, MissingShardError
from core.hf.name_tables import Pair
from core.hf.tensors import fuse
from core.hf.tensors.packed import transpose_tensor, unpack_expert
from core.hf.tensors.shifted import shifted_fragments
from core.hf.values import CONFIG
from core.quantize.schemes import check_numbers


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of the global form.

    Args:
        meta: name, dtype and shape.
        used: tensors of the source that it consists of.
        fragments: function that returns its fragments.
        copies: tensors among ``used`` that are redundant copies of it.
        is_shifted: its numbers are computed from those of the source (``core.hf.tensors.shifted``).
    """

    meta: TensorMeta
    used: tuple[str, ...]
    fragments: Callable[[], list[Fragment]]
    copies: tuple[str, ...] = ()
    is_shifted: bool = False

    def renamed(self, key: str) -> GlobalTensor:
        """Return the tensor under another key."""
        return replace(
            self,
            meta=replace(self.meta, key=key),
            fragments=lambda: [replace(fragment, key=key) for fragment in self.fragments()],
        )


def global_tensor(catalog: Catalog, pair: Pair) -> GlobalTensor:
    """Check the shapes and dtypes of a tensor's parts and return the tensor of the global form."""
    name = pair.names[0]
    # An expert may be one entry of a tensor that stacks all experts of its layer.
    if pair.stack is not None and pair.stack[0] in catalog.tensors:
        stack_key, index, extent = pair.stack
        _check_shape(catalog, stack_key, (extent, *pair.shape))
        check_numbers(catalog.tensors[stack_key])
        meta = TensorMeta(name, catalog.tensors[stack_key].dtype, pair.shape)
        return GlobalTensor(
            meta,
            (stack_key,),
            lambda: list(fuse.take_from_stack(catalog, stack_key, index, key=name)),
        )
    # Or a matrix of a tensor that holds those of all experts in another order.
    if (packed := pair.packed) is not None:
        key = _find_part(catalog, (packed.key,), pair)
        _check_shape(catalog, key, packed.tensor_shape(pair.shape))
        check_numbers(catalog.tensors[key])
        return GlobalTensor(
            TensorMeta(name, catalog.tensors[key].dtype, pair.shape),
            (key,),
            lambda: unpack_expert(catalog, name, packed, pair.shape),
        )
    # Or its parts are entries of tensors that stack those of all experts.
    if (entry := pair.entry) is not None:
        return _from_entries(catalog, pair, *entry)
    # Otherwise it consists of parts, and other tensors may repeat it.
    keys = [_find_part(catalog, tensor.names, pair) for tensor in pair.tensors]
    copies = [key for key in (*pair.copies, *pair.twins) if key in catalog.tensors]
    for key, tensor in zip(keys, pair.tensors, strict=True):
        _check_shape(catalog, key, tensor.shape)
    dtype = _common_dtype(catalog, (*keys, *copies), name)
    for key in copies:
        _check_shape(catalog, key, pair.shape)

    if (shift := pair.shift) is not None:
        (key,) = keys
        return GlobalTensor(
            TensorMeta(name, catalog.tensors[key].dtype, pair.shape),
            (key,),
            lambda: shifted_fragments(catalog, key, name, -shift),
            is_shifted=True,
        )
    if pair.is_flat:
        (key,) = keys
        return GlobalTensor(
            TensorMeta(name, catalog.tensors[key].dtype, pair.shape),
            (key,),
            lambda: list(fuse.take_from_stack(catalog, key, 0, key=name)),
        )
    # Copies are fragments of the same box, so that the planner compares their bytes.
    strips = pair.strips

    def part_fragments(key: str) -> Sequence[Fragment]:
        return transpose_tensor(catalog, key, key) if pair.is_transposed else catalog.fragments(key)

    def fragments() -> list[Fragment]:
        fused = fuse.fuse_parts(name, strips, [part_fragments(key) for key in keys])
        if pair.is_swapped:
            fused = fuse.swap_halves(fused, pair.shape[1])
        return fused + [
            replace(fragment, key=name) for key in copies for fragment in catalog.fragments(key)
        ]

    meta = TensorMeta(name, dtype, pair.shape)
    return GlobalTensor(meta, (*keys, *copies), fragments, tuple(copies))


def _from_entries(catalog: Catalog, pair: Pair, index: int, n_entries: int) -> GlobalTensor:
    """Return the tensor whose parts are entries of the first axis of their tensors.

    Args:
        index: number of the entry.
        n_entries: number of entries of each tensor.
    """
    name = pair.names[0]
    keys = [_find_part(catalog, tensor.names, pair) for tensor in pair.tensors]
    for key, tensor in zip(keys, pair.tensors, strict=True):
        _check_shape(catalog, key, (n_entries, *tensor.shape))

    def fragments() -> list[Fragment]:
        parts = [list(fuse.take_from_stack(catalog, key, index, key=key)) for key in keys]
        return fuse.fuse_parts(name, pair.strips, parts)

    meta = TensorMeta(name, _common_dtype(catalog, keys, name), pair.shape)
    return GlobalTensor(meta, tuple(keys), fragments)


def _common_dtype(catalog: Catalog, keys: Sequence[str], name: str) -> str:
    """Return the dtype of tensors that are one in Megatron.

    Raises:
        CorruptError: they have several dtypes.
        UnsupportedError: they are quantized.
    """
    # Reversed, so that the error names the first key with each dtype.
    dtypes = {catalog.tensors[key].dtype: key for key in reversed(keys)}
    if len(dtypes) > 1:
        (other, other_key), (first, first_key) = list(dtypes.items())[-2:]
        raise CorruptError(
            f"{first_key} is {first} and {other_key} is {other}, "
            "but they are one tensor in Megatron",
            key=name,
        )
    for key in keys:
        check_numbers(catalog.tensors[key])
    return next(iter(dtypes))


def _find_part(catalog: Catalog, names: Sequence[str], pair: Pair) -> str:
    """Return the first of a part's names that the source has.

    Raises:
        MissingShardError: the source has none of the names.
    """
    for key in names:
        if key in catalog.tensors:
            return key
    hint = None if pair.stack is None else f"the stacked tensor {pair.stack[0]} is missing as well"
    raise MissingShardError("the tensor is not in the checkpoint", key=names[0], hint=hint)


def _check_shape(catalog: Catalog, key: str, shape: Shape) -> None:
    """Raise CorruptError unless a tensor has the expected shape."""
    actual = catalog.tensors[key].shape
    if actual != shape:
        raise CorruptError(
            f"shape {actual}, but {CONFIG} implies {shape} (elements)",
            key=key,
            hint="is this the configuration of these weights?",
        )
