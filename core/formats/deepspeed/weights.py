"""The weights in model files, outside the flat groups: buffers, frozen, shared and other
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.errors import MissingShardError
from core.formats.deepspeed.pieces import (
    PartitionPiece,
    UnkeyedTensor,
    reshaped,
    tensor_of_array,
    tensor_of_pieces,
)
from core.formats.deepspeed.widened import as_float32

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.stored import StoredArray
    from core.formats.deepspeed.model_states import ModelStates


def buffers(model: ModelStates) -> dict[str, UnkeyedTensor]:
    """Return the buffers of the module, 16-bit ones as float32."""
    return {
        name: tensor_of_array(as_float32(model.module[name]))
        for name in model.buffers
        if name in model.module
    }


def frozen(models: Sequence[ModelStates], stage: int) -> dict[str, UnkeyedTensor]:
    """Return the frozen parameters: complete in ZeRO-2, a part on every rank in ZeRO-3."""
    tensors: dict[str, UnkeyedTensor] = {}
    for name, shape in models[0].frozen.items():
        arrays = []
        for model in models:
            if name not in model.fragments:
                raise MissingShardError(
                    "frozen_param_shapes lists the parameter, but frozen_param_fragments lacks it",
                    file=model.state.file,
                    key=name,
                )
            arrays.append(model.fragments[name])
        tensors[name] = (
            _frozen_3(models, name, shape, arrays)
            if stage == 3
            else _frozen_2(models[0], name, shape, arrays[0])
        )
    return tensors


def _frozen_2(model: ModelStates, name: str, shape: Shape, array: StoredArray) -> UnkeyedTensor:
    """Return a frozen parameter of ZeRO-2."""
    if array.shape == shape:
        return tensor_of_array(array)
    if prod(array.shape) != prod(shape) or array.extent.strides is not None:
        raise model.state.corrupt(
            f"the frozen parameter has shape {array.shape}, not {shape}", key=name
        )
    return tensor_of_array(reshaped(array, shape))


def _frozen_3(
    models: Sequence[ModelStates], name: str, shape: Shape, arrays: Sequence[StoredArray]
) -> UnkeyedTensor:
    """Return a frozen parameter of ZeRO-3, of which every rank has a part."""
    n = prod(shape)
    part = -(-n // len(models))
    flat = []
    for model, array in zip(models, arrays, strict=True):
        if prod(array.shape) != part or array.extent.strides is not None:
            raise model.state.corrupt(
                f"this rank's part of the frozen parameter has shape {array.shape}, not {part} elements",
                key=name,
            )
        flat.append(reshaped(array, (part,)))

    def pieces() -> Iterator[PartitionPiece]:
        for rank, array in enumerate(flat):
            start, stop = rank * part, min((rank + 1) * part, n)
            if start < stop:
                yield PartitionPiece(array, 0, start, stop - start)

    return tensor_of_pieces(arrays[0].dtype, shape, pieces)


@dataclass(frozen=True, slots=True)
class UnlistedWeights:
    """Parameters that no optimizer group and no list of frozen parameters names.

    Args:
        tensors: the parameters by name.
        notes: what the user should know about them.
        dropped: parameters that are stored nowhere.
    """

    tensors: dict[str, UnkeyedTensor]
    notes: list[str]
    dropped: list[str]


def unlisted_weights(
    model: ModelStates, listed: Mapping[str, UnkeyedTensor], stage: int
) -> UnlistedWeights:
    """Return the parameters that only the module has.

    Args:
        listed: the weights that are known from other entries.
    """
    names = [name for name in model.module if name not in listed and name not in model.shared]
    lost = [name for name in names if stage == 3 and 0 in model.module[name].shape]
    names = [name for name in names if name not in lost]
    notes = []
    if names:
        notes.append(
            f"{len(names)} parameters that are in no optimizer group, such as {names[0]}, are the model's copies in "
            "its own precision; zero_to_fp32 leaves them out"
        )
    tensors = {name: tensor_of_array(model.module[name]) for name in names}
    return UnlistedWeights(
        tensors, notes, [f"{name} (ZeRO-3 does not store its parts)" for name in lost]
    )


def with_shared(
    model: ModelStates, weights: Mapping[str, UnkeyedTensor]
) -> tuple[dict[str, UnkeyedTensor], dict[str, str]]:
    """Return the weights with their shared names added, and name → owner."""
    tensors = dict(weights)
    aliases = {}
    for name, owner in model.shared.items():
        if owner in tensors and name not in tensors:
            tensors[name] = tensors[owner]
            aliases[name] = owner
    return tensors, aliases
