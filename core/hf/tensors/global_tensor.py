"""Build one tensor of the global Megatron form of the Hugging Face tensors that it consists of."""

from __future__ import annotations

from collections.abc import Sequence

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.engine.quantize.schemes import check_numbers
from core.errors import CorruptError, MissingShardError
from core.hf.name_tables import Pair
from core.hf.tensors import fuse
from core.hf.values import CONFIG
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of the global form, and where it comes from.

    Args:
        tensor: the tensor.
        used: keys of the source's tensors that it consists of.
        copies: keys among ``used`` of redundant copies of it.
        is_shifted: its numbers are computed from those of the source (``core.hf.tensors.shifted``).
    """

    tensor: Tensor
    used: tuple[str, ...]
    copies: tuple[str, ...] = ()
    is_shifted: bool = False


def global_tensor(catalog: Catalog, pair: Pair) -> GlobalTensor:
    """Check the shapes and dtypes of a tensor's parts and return the tensor of the global form."""
    name = pair.names[0]
    # An expert may be one entry of a tensor that stacks all experts of its layer.
    if pair.stack is not None and pair.stack[0] in catalog.tensors:
        key, index, extent = pair.stack
        _check_shape(catalog, key, (extent, *pair.shape))
        check_numbers(key, catalog.tensors[key])
        return GlobalTensor(catalog.entry(key, index), (key,))
    # Or a matrix of a tensor that holds those of all experts in another order.
    if (packed := pair.packed) is not None:
        from core.hf.tensors.packed import unpack_expert

        key = _find_part(catalog, (packed.key,), pair)
        _check_shape(catalog, key, packed.tensor_shape(pair.shape))
        check_numbers(key, catalog.tensors[key])
        return GlobalTensor(unpack_expert(catalog, name, packed, pair.shape), (key,))

    # Otherwise it consists of parts, which may be entries of tensors that stack those of all
    # experts; and other tensors may repeat it.
    keys = [_find_part(catalog, part.names, pair) for part in pair.tensors]
    copies = [] if pair.entry else [k for k in (*pair.copies, *pair.twins) if k in catalog.tensors]
    for key, part in zip(keys, pair.tensors, strict=True):
        n_entries = () if pair.entry is None else pair.entry[1:]
        _check_shape(catalog, key, (*n_entries, *part.shape))
    for key in copies:
        _check_shape(catalog, key, pair.shape)
    _check_dtypes(catalog, (*keys, *copies), name)
    if (shift := pair.shift) is not None:
        from core.hf.tensors.shifted import shifted

        return GlobalTensor(
            shifted(catalog.tensors[keys[0]], keys[0], name, -shift), (keys[0],), is_shifted=True
        )
    if pair.is_flat:
        return GlobalTensor(catalog.tensors[keys[0]].select(0, 0), (keys[0],))
    if pair.entry is not None:
        parts = [catalog.entry(key, pair.entry[0]) for key in keys]
    elif pair.is_transposed:
        from core.hf.tensors.packed import transpose_tensor

        parts = [transpose_tensor(catalog.tensors[key], key, key) for key in keys]
    else:
        parts = [catalog.tensors[key] for key in keys]
    fused = fuse.fuse_parts(pair.strips, parts, pair.shape)
    if pair.is_swapped:
        fused = fuse.swap_halves(fused)
    # Copies are fragments of the same box, so that the planner compares their bytes.
    if copies:
        fused = fused.with_replicas(*(catalog.tensors[key] for key in copies))
    return GlobalTensor(fused, (*keys, *copies), tuple(copies))


def _check_dtypes(catalog: Catalog, keys: Sequence[str], name: str) -> None:
    """Raise unless tensors that are one in Megatron have one dtype.

    Raises:
        CorruptError: they have several dtypes.
        UnsupportedError: they are quantized.
    """
    # Reversed, so that the error names the first key with each dtype.
    dtypes = {catalog.tensors[key].dtype: key for key in reversed(keys)}
    if len(dtypes) > 1:
        (other, other_key), (first, first_key) = list(dtypes.items())[-2:]
        raise CorruptError(
            f"{first_key} is {first} and {other_key} is {other}, but Megatron stores them in one "
            "tensor",
            key=name,
        )
    for key in keys:
        check_numbers(key, catalog.tensors[key])


def _find_part(catalog: Catalog, names: Sequence[str], pair: Pair) -> str:
    """Return the first of a part's names that the source has.

    Raises:
        MissingShardError: the source has none of the names.
    """
    for key in names:
        if key in catalog.tensors:
            return key
    hint = None if pair.stack is None else f"the stacked tensor {pair.stack[0]} is missing, too"
    raise MissingShardError("the tensor is not in the checkpoint", key=names[0], hint=hint)


def _check_shape(catalog: Catalog, key: str, shape: Shape) -> None:
    """Raise CorruptError unless a tensor has the expected shape."""
    actual = catalog.tensors[key].shape
    if actual != shape:
        raise CorruptError(
            f"the tensor has shape {actual}, but {CONFIG} implies {shape}",
            key=key,
            hint=f"check that this is the right {CONFIG} for these weights",
        )
