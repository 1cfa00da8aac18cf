"""Split tensors of the global Megatron form into the Hugging Face tensors that they consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.stored import ArrayT
from core.engine.catalog.tensor import Tensor, stack
from core.engine.quantize.schemes import check_numbers
from core.errors import CorruptError
from core.hf.name_tables import Pair
from core.hf.tensors import fuse

_EXTRA = "_extra_state"
_VOCAB = ("embedding.word_embeddings.", "output_layer.")


def weights_in(catalog: Catalog[ArrayT]) -> dict[str, Tensor[ArrayT]]:
    """Return the tensors that are neither optimizer states nor extra states."""
    return {
        key: tensor
        for key, tensor in catalog.tensors.items()
        if not is_optimizer_key(key) and _EXTRA not in key
    }


def hf_tensors(catalog: Catalog, pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors that Megatron's tensors consist of, by name.

    Args:
        catalog: tensors under Megatron's names.
        pairs: Megatron's name of each tensor → its pair.

    Raises:
        CorruptError: a tensor has another shape than the arguments imply, or the experts of a layer
            differ in dtype.
    """
    tensors: dict[str, Tensor] = {}
    packed: dict[str, list[tuple[str, Pair]]] = {}
    entries: dict[str, list[Tensor]] = {}
    for name, pair in pairs.items():
        if pair.packed is not None:
            packed.setdefault(pair.packed.key, []).append((name, pair))
        elif pair.entry is not None:
            for key, tensor in _split_tensor(catalog.tensors[name], name, pair).items():
                entries.setdefault(key, []).append(tensor)
        else:
            tensors |= _split_tensor(catalog.tensors[name], name, pair)
    for key, experts in entries.items():
        for number, expert in enumerate(experts):
            if expert.dtype != experts[0].dtype:
                raise CorruptError(
                    f"expert {number}'s part is {expert.dtype} and expert 0's part is "
                    f"{experts[0].dtype}, but Hugging Face models store them in one tensor",
                    key=key,
                )
        tensors[key] = stack(experts)
    return tensors | {key: _packed_tensor(catalog, key, group) for key, group in packed.items()}


def list_padding(tensors: Mapping[str, Tensor], pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    """Return the rows that ``hf_tensors`` leaves out, by Megatron's name: padding."""
    padding: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        tensor = tensors[name]
        if _is_padded(tensor, name, pair):
            n_rows = pair.shape[0]
            padding[name] = tensor.narrow(0, n_rows, tensor.shape[0] - n_rows)
    return padding


def _is_padded(tensor: Tensor, name: str, pair: Pair) -> bool:
    """Return whether a tensor has more rows than the arguments imply, which the vocabulary may."""
    return (
        name.startswith(_VOCAB)
        and len(tensor.shape) == len(pair.shape)
        and tensor.shape[1:] == pair.shape[1:]
        and tensor.shape[0] > pair.shape[0]
    )


def _split_tensor(tensor: Tensor, name: str, pair: Pair) -> dict[str, Tensor]:
    """Return the Hugging Face tensors that a Megatron tensor is split into."""
    check_numbers(name, tensor)
    if _is_padded(tensor, name, pair):
        tensor = tensor.narrow(0, 0, pair.shape[0])
    if tensor.shape != pair.shape:
        raise CorruptError(
            f"the tensor has shape {tensor.shape}, but the training arguments imply {pair.shape}",
            key=name,
        )
    if (shift := pair.shift) is not None:
        from core.hf.tensors.shifted import shifted

        key = pair.tensors[0].names[0]
        return {key: shifted(tensor, name, key, shift)}
    if pair.is_flat:
        return {pair.tensors[0].names[0]: stack([tensor])}
    if pair.is_swapped:
        tensor = fuse.swap_halves(tensor)

    # Copies that transformers expects under a second name are written as part 0, which is all of
    # it.
    keys = [(part.names[0], number, part.shape) for number, part in enumerate(pair.tensors)]
    keys += [(key, 0, pair.shape) for key in pair.twins]
    tensors: dict[str, Tensor] = {}
    for key, number, shape in keys:
        rows = shape[::-1] if pair.is_transposed else shape
        part = fuse.take_apart(pair.strips, number, tensor, rows)
        if pair.is_transposed:
            from core.hf.tensors.packed import transpose_tensor

            part = transpose_tensor(part, key, key)
        tensors[key] = part
    return tensors


def _packed_tensor(catalog: Catalog, key: str, pairs: Sequence[tuple[str, Pair]]) -> Tensor:
    """Return the tensor that holds the matrices of all experts of a layer.

    Args:
        pairs: Megatron's name of each expert's tensor, and its pair.

    Raises:
        CorruptError: the experts' tensors differ in dtype, or in shape from the arguments.
    """
    shape = pairs[0][1].shape
    first_name, first = pairs[0][0], catalog.tensors[pairs[0][0]]
    for name, _ in pairs:
        tensor = catalog.tensors[name]
        check_numbers(name, tensor)
        if tensor.shape != shape:
            raise CorruptError(
                f"the tensor has shape {tensor.shape}, but the training arguments imply {shape}",
                key=name,
            )
        if tensor.dtype != first.dtype:
            raise CorruptError(
                f"{name} is {tensor.dtype} and {first_name} is {first.dtype}, but Hugging Face "
                "models store them in one tensor",
                key=key,
            )
    from core.hf.tensors.packed import pack_experts

    experts = [
        (name, catalog.tensors[name], pair.packed)
        for name, pair in pairs
        if pair.packed is not None
    ]
    return pack_experts(experts, shape)
