"""Split tensors of the global Megatron form into the Hugging Face tensors that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Shape
from core.catalog.catalog import AnyCatalog, Catalog, Fragment, TensorMeta
from core.catalog.optimizer_keys import is_optimizer_key
from core.errors import CorruptError
from core.hf.name_tables import Pair
from core.hf.tensors import fuse
from core.hf.tensors.packed import pack_experts, transpose_tensor
from core.hf.tensors.shifted import shifted_fragments
from core.quantize.schemes import check_numbers

_EXTRA = "_extra_state"
_VOCAB = ("embedding.word_embeddings.", "output_layer.")


def weights_in(catalog: AnyCatalog) -> dict[str, TensorMeta]:
    """Return the tensors that are neither optimizer states nor extra states."""
    return {
        key: meta
        for key, meta in catalog.tensors.items()
        if not is_optimizer_key(key) and _EXTRA not in key
    }


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor under its Hugging Face name, with a function that returns its fragments."""

    meta: TensorMeta
    fragments: Callable[[], list[Fragment]]

    def renamed(self, key: str) -> HfTensor:
        """Return the tensor under another key."""
        return HfTensor(
            replace(self.meta, key=key),
            lambda: [replace(fragment, key=key) for fragment in self.fragments()],
        )


def hf_tensors(catalog: Catalog, pairs: Mapping[str, Pair]) -> dict[str, HfTensor]:
    """Return the Hugging Face tensors that Megatron's tensors consist of.

    Args:
        catalog: tensors under Megatron's names.
        pairs: Megatron's name of each tensor → its pair.
    """
    tensors: dict[str, HfTensor] = {}
    experts: dict[str, list[tuple[str, Pair]]] = {}
    entries: dict[str, list[HfTensor]] = {}
    for name, pair in pairs.items():
        if pair.packed is not None:
            experts.setdefault(pair.packed.key, []).append((name, pair))
        elif pair.entry is not None:
            for key, tensor in _split_tensor(catalog, name, pair).items():
                entries.setdefault(key, []).append(tensor)
        else:
            tensors |= _split_tensor(catalog, name, pair)
    tensors |= {key: _stacked_tensor(key, members) for key, members in entries.items()}
    return tensors | {
        key: _packed_tensor(catalog, key, members) for key, members in experts.items()
    }


def _split_tensor(catalog: Catalog, name: str, pair: Pair) -> dict[str, HfTensor]:
    """Return the Hugging Face tensors that a Megatron tensor is split into."""
    meta = catalog.tensors[name]
    check_numbers(meta)
    is_vocab = name.startswith(_VOCAB)
    # Only the tensors of the vocabulary may have more rows than the arguments imply: padding.
    is_padded = (
        is_vocab
        and len(meta.shape) == len(pair.shape)
        and meta.shape[1:] == pair.shape[1:]
        and meta.shape[0] > pair.shape[0]
    )
    if meta.shape != pair.shape and not is_padded:
        raise CorruptError(
            f"shape {meta.shape}, but the training arguments imply {pair.shape} (elements)",
            key=meta.key,
        )

    def true_fragments() -> Sequence[Fragment]:
        fragments = catalog.fragments(name)
        if pair.is_swapped:
            fragments = fuse.swap_halves(fragments, pair.shape[1])
        return fuse.first_rows(name, fragments, pair.shape[0]) if is_padded else fragments

    if (shift := pair.shift) is not None:
        key = pair.tensors[0].names[0]
        return {
            key: HfTensor(
                TensorMeta(key, meta.dtype, pair.shape),
                lambda: shifted_fragments(catalog, name, key, shift),
            )
        }
    if pair.is_flat:
        (flat,) = pair.tensors
        key = flat.names[0]
        return {
            key: HfTensor(
                TensorMeta(key, meta.dtype, flat.shape),
                lambda: fuse.with_first_axis(key, catalog.fragments(name)),
            )
        }
    strips = pair.strips

    # Bound to its arguments by a function of its own: a lambda in the loop would see the last ones.
    def take(key: str, part: int) -> Callable[[], list[Fragment]]:
        return lambda: fuse.take_apart(key, strips, part, true_fragments())

    def take_transposed(key: str, part: int, shape: Shape) -> Callable[[], list[Fragment]]:
        matrix = replace(
            catalog,
            tensors={key: TensorMeta(key, meta.dtype, shape[::-1])},
            fragments_of=lambda _: take(key, part)(),
        )
        return lambda: transpose_tensor(matrix, key, key)

    # Copies that transformers expects under a second name are written as part 0, which is all of
    # it.
    keys = [(tensor.names[0], number, tensor.shape) for number, tensor in enumerate(pair.tensors)]
    keys += [(key, 0, pair.shape) for key in pair.twins]
    return {
        key: HfTensor(
            TensorMeta(key, meta.dtype, shape),
            take_transposed(key, number, shape) if pair.is_transposed else take(key, number),
        )
        for key, number, shape in keys
    }


def _stacked_tensor(key: str, entries: Sequence[HfTensor]) -> HfTensor:
    """Return the tensor whose first axis has an entry for each of several tensors, in order.

    Raises:
        CorruptError: the tensors differ in dtype.
    """
    first = entries[0].meta
    for number, entry in enumerate(entries):
        if entry.meta.dtype != first.dtype:
            raise CorruptError(
                f"the part of expert {number} is {entry.meta.dtype} and that of expert 0 is "
                f"{first.dtype}, but they are one tensor in Hugging Face models",
                key=key,
            )
    return HfTensor(
        TensorMeta(key, first.dtype, (len(entries), *first.shape)),
        lambda: [
            fragment
            for number, entry in enumerate(entries)
            for fragment in fuse.with_first_axis(key, entry.fragments(), number)
        ],
    )


def _packed_tensor(catalog: Catalog, key: str, pairs: Sequence[tuple[str, Pair]]) -> HfTensor:
    """Return the tensor that holds the matrices of all experts of a layer.

    Args:
        pairs: Megatron's name of each expert's tensor, and its pair.

    Raises:
        CorruptError: the experts' tensors differ in dtype, or in shape from the arguments.
    """
    shape = pairs[0][1].shape
    metas = [catalog.tensors[name] for name, _ in pairs]
    for meta in metas:
        check_numbers(meta)
        if meta.shape != shape:
            raise CorruptError(
                f"shape {meta.shape}, but the training arguments imply {shape} (elements)",
                key=meta.key,
            )
        if meta.dtype != metas[0].dtype:
            raise CorruptError(
                f"{meta.key} is {meta.dtype} and {metas[0].key} is {metas[0].dtype}, "
                "but they are one tensor in Hugging Face models",
                key=key,
            )
    experts = [(name, pair.packed) for name, pair in pairs if pair.packed is not None]
    return HfTensor(
        TensorMeta(key, metas[0].dtype, experts[0][1].tensor_shape(shape)),
        lambda: pack_experts(catalog, experts, shape),
    )
