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
from core.formats.deepspeed.pieces import UnkeyedTensor, reshaped, tensor_of_array
from core.formats.deepspeed.state_file import read_value, type_of
from core.formats.deepspeed.tree import WholeObject
from core.formats.deepspeed.universal.names import CAT_DIM, FP32, PARAM, STEP, plain_extras
from core.pickle.inert import TensorLeaf, as_mapping

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class UniversalParameter:
    """The content of a parameter's directory.

    Args:
        weight: its master weights.
        states: state name → ``UnkeyedTensor`` or ``WholeObject``.
        extras: how tensor parallelism cuts it; {} for the usual way.
    """

    weight: UnkeyedTensor
    states: dict[str, object]
    extras: Mapping[str, object]


def lacking_files(files_of: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, file) for every file that a parameter lacks but most parameters with states
    have.

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
) -> UniversalParameter:
    """Read the directory of a parameter.

    Args:
        shape: shape in the model states, for bare tensors.
        is_uncut: whether that is the complete shape, not a model-parallel rank's part of it.
    """
    stems = [file.removesuffix(".pt") for file in store.files(folder) if file.endswith(".pt")]
    if FP32 not in stems:
        raise MissingShardError(
            "the parameter has no fp32 weights",
            file=f"{folder}/{FP32}.pt",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )
    entries = {
        stem: _read_named_entry(store, f"{folder}/{stem}.pt", shape, name)
        for stem in (FP32, *stems)
    }

    # The masters tell shape and cut of the parameter.
    weight, extras = entries.pop(FP32)
    file = f"{folder}/{FP32}.pt"
    if not isinstance(weight, StoredArray):
        raise CorruptError(f"the file holds a {type_of(weight)}, not a tensor", file=file, key=name)
    if is_uncut and shape is not None and weight.shape != shape:
        raise CorruptError(
            f"the weights have the shape {weight.shape}, but the model states give the parameter {shape}",
            file=file,
            key=name,
        )

    # States have the same; a step is one number.
    states: dict[str, object] = {}
    for stem, (value, state_extras) in entries.items():
        if not isinstance(value, StoredArray):
            states[stem] = WholeObject(value)
            continue
        problem = _state_problem(stem, value, state_extras, weight=weight, extras=extras)
        if problem is not None:
            raise CorruptError(problem, file=f"{folder}/{stem}.pt", key=name)
        states[stem] = tensor_of_array(value)
    is_usual = dict(extras) in ({}, {CAT_DIM: 0})
    return UniversalParameter(tensor_of_array(weight), states, {} if is_usual else extras)


def _state_problem(
    state: str,
    array: StoredArray,
    state_extras: Mapping[str, object],
    *,
    weight: StoredArray,
    extras: Mapping[str, object],
) -> str | None:
    """Return why a tensor cannot be a state of a parameter; None if it can."""
    if state == STEP:
        return f"the step is a tensor of shape {array.shape}" if prod(array.shape) != 1 else None
    if array.shape == weight.shape and state_extras == extras:
        return None
    return (
        f"state {state!r} has shape {array.shape} and is cut by {dict(state_extras)!r:.80}, but the weights have "
        f"{weight.shape} and {dict(extras)!r:.80}"
    )


def _read_named_entry(
    store: ReadStore, file: str, shape: Shape | None, name: str
) -> tuple[object, Mapping[str, object]]:
    """Read a parameter's file as ``_read_entry`` does; errors name the parameter."""
    try:
        return _read_entry(store, file, shape)
    except CheckpointingException as err:
        err.key = err.key or name
        raise


def _read_entry(
    store: ReadStore, file: str, shape: Shape | None
) -> tuple[object, Mapping[str, object]]:
    """Read a parameter's file: an array or a value, and the other entries of its dict."""
    value, arrays = read_value(store, file)
    mapping = as_mapping(value)
    if mapping is None:
        if not isinstance(value, TensorLeaf):
            return value, {}
        return _shaped(arrays[value.key], shape, file), {}
    leaf = mapping.get(PARAM)
    if not isinstance(leaf, TensorLeaf):
        raise CorruptError(
            f"the file's entry {PARAM!r} is a {type_of(leaf)}, not a tensor", file=file
        )
    return arrays[leaf.key], plain_extras(
        {str(key): item for key, item in mapping.items() if key != PARAM}
    )


def _shaped(array: StoredArray, shape: Shape | None, file: str) -> StoredArray:
    """Return a bare tensor in the shape that the model states give it; scalars keep theirs."""
    if shape is None or array.shape in ((), shape):
        return array
    if prod(array.shape) != prod(shape) or array.extent.strides is not None:
        raise CorruptError(
            f"the tensor has {prod(array.shape)} elements, but the model states give it the shape {shape}",
            file=file,
        )
    return reshaped(array, shape)
