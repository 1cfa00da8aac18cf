"""The weights that model files hold beside the flat groups: buffers, frozen, shared and other parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from core.errors import MissingShardError
from core.formats.deepspeed.pieces import Held, Piece, held_flat, held_whole, reshaped
from core.formats.deepspeed.widened import as_float32

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.stored import StoredArray
    from core.formats.deepspeed.model_states import ModelStates


def buffers(model: ModelStates) -> dict[str, Held]:
    return {name: held_whole(as_float32(model.module[name])) for name in model.buffers if name in model.module}


def frozen(models: Sequence[ModelStates], stage: int) -> dict[str, Held]:
    """Frozen parameters: whole in ZeRO-2, a part on every rank in ZeRO-3."""
    found: dict[str, Held] = {}
    for name, shape in models[0].frozen.items():
        arrays = []
        for model in models:
            if name not in model.fragments:
                raise MissingShardError(
                    "frozen_param_fragments does not hold the parameter that frozen_param_shapes lists",
                    file=model.state.file,
                    key=name,
                )
            arrays.append(model.fragments[name])
        found[name] = (
            _frozen_3(models, name, shape, arrays) if stage == 3 else _frozen_2(models[0], name, shape, arrays[0])
        )
    return found


def _frozen_2(model: ModelStates, name: str, shape: Shape, array: StoredArray) -> Held:
    if array.shape == shape:
        return held_whole(array)
    if prod(array.shape) != prod(shape) or array.extent.strides is not None:
        raise model.state.corrupt(f"the frozen parameter has shape {array.shape}, not {shape}", key=name)
    return held_whole(reshaped(array, shape))


def _frozen_3(models: Sequence[ModelStates], name: str, shape: Shape, arrays: Sequence[StoredArray]) -> Held:
    n = prod(shape)
    part = -(-n // len(models))
    flat = []
    for model, array in zip(models, arrays, strict=True):
        if prod(array.shape) != part or array.extent.strides is not None:
            raise model.state.corrupt(
                f"this rank's part of the frozen parameter has shape {array.shape}, not {part} elements", key=name
            )
        flat.append(reshaped(array, (part,)))

    def pieces() -> Iterator[Piece]:
        for rank, array in enumerate(flat):
            start, stop = rank * part, min((rank + 1) * part, n)
            if start < stop:
                yield Piece(array, 0, start, stop - start)

    return held_flat(arrays[0].dtype, shape, pieces)


def unlisted(
    model: ModelStates, known: Mapping[str, Held], stage: int, notes: list[str], dropped: list[str]
) -> dict[str, Held]:
    """Parameters that only the module has."""
    names = [name for name in model.module if name not in known and name not in model.shared]
    if stage == 3:
        lost = [name for name in names if 0 in model.module[name].shape]
        dropped += [f"{name} (ZeRO-3 keeps its parts nowhere)" for name in lost]
        names = [name for name in names if 0 not in model.module[name].shape]
    if names:
        notes.append(
            f"{len(names)} parameters that no optimizer group has, such as {names[0]}, are the model's copies in its "
            "own precision; zero_to_fp32 leaves them out"
        )
    return {name: held_whole(model.module[name]) for name in names}


def with_shared(model: ModelStates, weights: Mapping[str, Held]) -> tuple[dict[str, Held], dict[str, str]]:
    """The weights with the names that are other names of one of them; and name → owner."""
    found = dict(weights)
    aliases = {}
    for name, owner in model.shared.items():
        if owner in found and name not in found:
            found[name] = found[owner]
            aliases[name] = owner
    return found, aliases
