"""The directory of a parameter in a universal checkpoint.

::

    fp32.pt, exp_avg.pt …    {"cat_dim": 0, "param": tensor}, or a bare flat tensor (ZeRO-3)
    step.pt                  a bare tensor of one element, or a number
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.catalog.stored import StoredArray
from core.errors import CheckpointingException, CorruptError, MissingShardError
from core.formats.deepspeed.pieces import Held, held_whole, reshaped
from core.formats.deepspeed.state_file import read_value, type_of
from core.formats.deepspeed.tree import Whole
from core.formats.deepspeed.universal.names import CAT_DIM, FP32, PARAM, STEP, plain_extras
from core.pickle.inert import TensorLeaf, as_mapping

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the directory of a parameter holds.

    Args:
        weight: its masters.
        states: state name → ``Held`` or ``Whole``.
        extras: how tensor parallelism cuts it; {} where it does so in the usual way.
    """

    weight: Held
    states: dict[str, object]
    extras: Mapping[str, object]


def lacking_files(files_of: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, file) for every file that most parameters with optimizer states have, and this one lacks.

    A parameter that has only weights is frozen, and lacks nothing but weights.

    Args:
        files_of: parameter → names of the files in its directory.
    """
    trained = [files for files in files_of.values() if len(files) > 1]
    counts = Counter(file for files in trained for file in files)
    usual = {file for file, n in counts.items() if 2 * n > len(trained)}
    for name, files in files_of.items():
        for file in sorted((usual if len(files) > 1 else {f"{FP32}.pt"}) - set(files)):
            yield name, file


def read_parameter(
    store: ReadStore, folder: str, name: str, shape: Shape | None, *, is_uncut: bool = False
) -> Parameter:
    """Reads the directory of a parameter.

    Args:
        shape: as the model states have it; bare tensors get it.
        is_uncut: that is the whole shape, not a model-parallel rank's part of it.
    """
    stems = [file.removesuffix(".pt") for file in store.files(folder) if file.endswith(".pt")]
    if FP32 not in stems:
        raise MissingShardError(
            "the parameter has no fp32 weights",
            file=f"{folder}/{FP32}.pt",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )
    weight: StoredArray | None = None
    extras: Mapping[str, object] = {}
    states: dict[str, object] = {}
    for stem in [FP32, *(stem for stem in stems if stem != FP32)]:
        file = f"{folder}/{stem}.pt"
        try:
            found, beside = _entry(store, file, shape)
        except CheckpointingException as err:
            err.key = err.key or name
            raise
        if stem == FP32:
            if not isinstance(found, StoredArray):
                raise CorruptError(f"the file holds a {type_of(found)}, not a tensor", file=file, key=name)
            if is_uncut and shape is not None and found.shape != shape:
                raise CorruptError(
                    f"the weights have the shape {found.shape}, but the model states give the parameter {shape}",
                    file=file,
                    key=name,
                )
            weight, extras = found, beside
        elif stem == STEP and isinstance(found, StoredArray) and prod(found.shape) != 1:
            raise CorruptError(f"the step is a tensor of shape {found.shape}", file=file, key=name)
        elif stem == STEP or not isinstance(found, StoredArray):
            states[stem] = held_whole(found) if isinstance(found, StoredArray) else Whole(found)
        else:
            assert weight is not None
            if found.shape != weight.shape or beside != extras:
                raise CorruptError(
                    f"state {stem!r} has shape {found.shape} and is cut by {dict(beside)!r:.80}, the weights have "
                    f"{weight.shape} and {dict(extras)!r:.80}",
                    file=file,
                    key=name,
                )
            states[stem] = held_whole(found)
    assert weight is not None
    usual = dict(extras) in ({}, {CAT_DIM: 0})
    return Parameter(held_whole(weight), states, {} if usual else extras)


def _entry(store: ReadStore, file: str, shape: Shape | None) -> tuple[object, Mapping[str, object]]:
    """What a parameter's file holds: an array or a value; and what stands beside it in its dict."""
    value, arrays = read_value(store, file)
    mapping = as_mapping(value)
    if mapping is None:
        if not isinstance(value, TensorLeaf):
            return value, {}
        return _shaped(arrays[value.key], shape, file), {}
    leaf = mapping.get(PARAM)
    if not isinstance(leaf, TensorLeaf):
        raise CorruptError(f"the file's entry {PARAM!r} is a {type_of(leaf)}, not a tensor", file=file)
    return arrays[leaf.key], plain_extras({str(key): item for key, item in mapping.items() if key != PARAM})


def _shaped(array: StoredArray, shape: Shape | None, file: str) -> StoredArray:
    """A bare tensor in the shape that the model states give it; scalars stay."""
    if shape is None or array.shape in ((), shape):
        return array
    if prod(array.shape) != prod(shape) or array.extent.strides is not None:
        raise CorruptError(
            f"the tensor has {prod(array.shape)} elements, the model states give it the shape {shape}", file=file
        )
    return reshaped(array, shape)
