"""The directory of a parameter in a universal checkpoint.

::

    fp32.pt, exp_avg.pt …    {"cat_dim": 0, "param": tensor}, or a bare flat tensor (ZeRO-3)
    step.pt                  a bare tensor of one element, or a number

Each name in a universal checkpoint corresponds to a key of a catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Tensor, whole_tensor
from core.errors import CorruptError, MissingShardError, placing_errors
from core.formats.deepspeed.runs import reshaped
from core.formats.deepspeed.state_file import read_value
from core.formats.deepspeed.tree import OPTIMIZER, STATE, WholeObject
from core.pickle.fields import FieldReader
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping, attributes
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore

LATEST = "latest_universal"
ZERO = "zero"
MODEL_FILE = "mp_rank_00_model_states.pt"
ZERO_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "zero/optimizer_state.pt"
FP32 = "fp32"
STEP = "step"
PARAM = "param"
CAT_DIM = "cat_dim"

MASTER = "fp32_param"
STEP_COPY = "universal step"
"""Key of the hidden tensor that is the step in ``optimizer_state.pt``, see ``for_universal``."""

PACKAGES = frozenset({"deepspeed"})
"""Packages that the loader of a universal checkpoint can import, except torch and numpy."""
DS_VERSION = "0.19.8"
"""The version that is written if the source records none: that of the loader documented here."""

_SUBPARAM_KEY = "sub_param_shape"
_SUBPARAM_CLASS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def plain_extras(extras: Mapping[str, object]) -> dict[str, object]:
    """Convert the description of a parameter's sharding to plain values.

    DeepSpeed's ``SubparamShape`` becomes a dict.
    """
    return {
        name: dict(fields)
        if name == _SUBPARAM_KEY and (fields := attributes(value)) is not None
        else value
        for name, value in extras.items()
    }


def stored_extras(extras: Mapping[object, object]) -> dict[object, object]:
    """Convert the description of a parameter's sharding to DeepSpeed's form.

    This is the inverse of ``plain_extras``.
    """
    stored = dict(extras)
    fields = as_mapping(stored.get(_SUBPARAM_KEY))
    if fields is not None:
        shape = Inert("newobj", _SUBPARAM_CLASS)
        shape.state = dict(fields)
        stored[_SUBPARAM_KEY] = shape
    return stored


def split_state_path(key: str, names: Container[str]) -> tuple[str, str] | None:
    """Split a key ``optimizer.state.<parameter>.<state>`` into (state, parameter).

    Args:
        names: names of the parameters.

    Returns:
        None for other keys, and for states of other parameters.
    """
    prefix = f"{OPTIMIZER}.{STATE}."
    if not key.startswith(prefix):
        return None
    name, _, state = key.removeprefix(prefix).rpartition(".")
    return (state, name) if name in names and state else None


@dataclass(frozen=True, slots=True)
class UniversalParameter:
    """The content of a parameter's directory.

    Args:
        weight: the master weights.
        states: state name → ``Tensor`` or ``WholeObject``.
        extras: how tensor parallelism shards the parameter; {} if along axis 0.
    """

    weight: Tensor
    states: dict[str, object]
    extras: Mapping[str, object]


def lacking_files(files_of: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, file) for every file that is missing from a parameter's directory.

    A file is missing if most parameters with states have it. A parameter that has only weights is
    frozen, and needs no states.

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
    store: ReadStore,
    folder: str,
    name: str,
    shape: Shape | None,
    *,
    is_uncut: bool = False,
    has_states: bool = True,
) -> UniversalParameter:
    """Read the directory of a parameter.

    Args:
        shape: shape in the model states, for bare tensors; None if it is not recorded.
        is_uncut: that shape is the complete one, not that of a model-parallel rank's shard.
        has_states: False to read the weights alone.

    Raises:
        MissingShardError: the master weights are missing.
        CorruptError: a file is damaged, or shapes contradict each other.
    """
    stems = [file.removesuffix(".pt") for file in store.files(folder) if file.endswith(".pt")]
    if FP32 not in stems:
        raise MissingShardError(
            "the parameter's fp32 weights are missing",
            file=f"{folder}/{FP32}.pt",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )
    # ``fp32.pt`` is read first, so that damage to it is reported first.
    entries = {
        stem: _read_entry(store, f"{folder}/{stem}.pt", None if stem == STEP else shape, key=name)
        for stem in (FP32, *(stems if has_states else ()))
    }

    # The master weights define the parameter's shape and sharding.
    weight, extras = entries.pop(FP32)
    file = f"{folder}/{FP32}.pt"
    if not isinstance(weight, StoredArray):
        raise FieldReader(file, name).build_error(weight, "the content", "a tensor")
    if is_uncut and shape is not None and weight.shape != shape:
        raise CorruptError(
            f"the weights have shape {weight.shape}, but the model states record shape {shape}",
            file=file,
            key=name,
        )

    # The states must match it; a step is one number.
    states: dict[str, object] = {}
    for stem, (value, state_extras) in entries.items():
        if not isinstance(value, StoredArray):
            states[stem] = WholeObject(value)
            continue
        problem = _state_problem(stem, value, state_extras, weight=weight, extras=extras)
        if problem is not None:
            raise CorruptError(problem, file=f"{folder}/{stem}.pt", key=name)
        states[stem] = whole_tensor(value)
    is_usual = dict(extras) in ({}, {CAT_DIM: 0})
    return UniversalParameter(whole_tensor(weight), states, {} if is_usual else extras)


def _state_problem(
    state: str,
    array: StoredArray,
    state_extras: Mapping[str, object],
    *,
    weight: StoredArray,
    extras: Mapping[str, object],
) -> str | None:
    """Return the reason why a tensor cannot be a state of a parameter; None if it can."""
    if state == STEP:
        return (
            f"the step has shape {array.shape}, not one value" if prod(array.shape) != 1 else None
        )
    if array.shape == weight.shape and state_extras == extras:
        return None
    if array.shape != weight.shape:
        return f"state {state!r} has shape {array.shape}, but the weights have shape {weight.shape}"
    return (
        f"state {state!r} is sharded as {dict(state_extras)!r:.80}, but the weights are sharded as "
        f"{dict(extras)!r:.80}"
    )


def _read_entry(
    store: ReadStore, file: str, shape: Shape | None, *, key: str
) -> tuple[object, Mapping[str, object]]:
    """Read a file of a parameter: its array or value, and the other entries of its dict.

    Args:
        shape: shape in the model states, for a bare tensor; None for a step, which is one number.
        key: the parameter, for messages.
    """
    with placing_errors(key=key):
        value, arrays = read_value(store, file)
    # ZeRO-1 and 2 store a dict, ZeRO-3 a bare tensor; a step may be a number.
    mapping = as_mapping(value)
    if mapping is None:
        if not isinstance(value, TensorLeaf):
            return value, {}
        return _shaped(arrays[value.key], shape, file, key=key), {}
    leaf = mapping.get(PARAM)
    if not isinstance(leaf, TensorLeaf):
        raise FieldReader(file, key).build_error(leaf, f"the entry {PARAM!r}", "a tensor")
    return arrays[leaf.key], plain_extras(
        {str(name): item for name, item in mapping.items() if name != PARAM}
    )


def _shaped(array: StoredArray, shape: Shape | None, file: str, *, key: str) -> StoredArray:
    """Return a bare tensor with the shape that the model states record; scalars keep theirs."""
    if shape is None or array.shape in ((), shape):
        return array
    if prod(array.shape) != prod(shape) or array.extent.strides is not None:
        raise CorruptError(
            f"the tensor has {prod(array.shape)} elements, but the model states record the shape "
            f"{shape}",
            file=file,
            key=key,
        )
    return reshaped(array, shape)
