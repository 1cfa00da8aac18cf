"""DeepSpeed's universal checkpoint: one directory per parameter, free of ranks.

On disk::

    latest_universal                            name of the directory
    global_step10_universal/
    ├── mp_rank_00_model_states.pt              client state; ZeRO-0, 1 and 2 look for it …
    ├── zero_pp_rank_0_mp_rank_00_model_states.pt   … and ZeRO-3 for this one
    └── zero/
        ├── optimizer_state.pt                  param_groups, loss scaler; for ZeRO-3 the step as well
        └── <parameter>/
            ├── fp32.pt                         {"cat_dim": 0, "param": tensor}; a buffer: {"param": tensor}
            ├── exp_avg.pt, exp_avg_sq.pt …     the same for each state of the optimizer
            └── step.pt                         a bare tensor or number

Read: what ``ds_to_universal.py`` writes, for ZeRO-1 and 2 (dicts, as above) and for ZeRO-3 (bare flat tensors, whose
shapes stand in the model files, and the step in ``optimizer_state.pt`` alone). Keys are those of
``core.formats.deepspeed_tree``, so that a checkpoint and its universal form have the same catalog. How parameters were
cut by tensor parallelism (``cat_dim`` other than 0, ``vocab_tensor``, ``sub_param_shape`` …) becomes the object
``universal.<parameter>``.

Written: always dicts with whole shapes, and what the loaders of all stages look for, so that one checkpoint loads with
every stage (0.19.8; ZeRO-3 of older versions wants bare tensors). Objects: ``optimizer.param_groups…`` and every other
``optimizer.…`` go to ``optimizer_state.pt``, ``universal.…`` into the parameters' files, all others to
``mp_rank_00_model_states.pt``; classes that the loader could not import are put aside (``core.formats.torch_aside``).
Shared parameters are recorded, not repeated. 16-bit weights are refused: DeepSpeed would take them for masters.

Not carried: what describes the partition of the run that saved (``group_paddings`` …), and the model file's 16-bit
``module``, which the loader does not look at.

attrs: ``iteration``, ``aliases``, ``notes``.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``, ``runtime/engine.py`` (``load_checkpoint``); checkpoints that
it wrote, pinned in tests/golden (``deepspeed_universal``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.catalog import StoredArray
from core.errors import CheckpointingException, CorruptError, MissingShardError
from core.formats import Format
from core.formats.deepspeed_model import ModelStates, iteration_of, model_states, version_of
from core.formats.deepspeed_optim import CONSUMED_OPTIM, OPTIMIZER_STATE
from core.formats.deepspeed_piece import Held, held_whole, reshaped
from core.formats.deepspeed_state import StateFile, read_state_file, read_value, type_of
from core.formats.deepspeed_tree import PARAM_GROUPS, PARAMS, STATE, Whole, assembled, group_trees, tree_of
from core.formats.deepspeed_universal_files import lay_out
from core.formats.deepspeed_universal_names import (
    CAT_DIM,
    EXTRAS,
    FP32,
    LATEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PARAM,
    STEP,
    ZERO,
    ZERO_MODEL_FILE,
    plain_extras,
)
from core.formats.deepspeed_universal_source import for_universal
from core.formats.deepspeed_weights import buffers, frozen, with_shared
from core.inert import TensorLeaf, as_mapping
from core.store import checked_name

if TYPE_CHECKING:
    from core.box import Shape
    from core.catalog import Catalog
    from core.store import ReadStore

__all__ = ["FORMAT", "for_universal", "lay_out", "read", "sniff"]

_MAX_NAME_BYTES = 4096


def sniff(store: ReadStore) -> bool:
    """Whether the directory is a universal checkpoint, or names one in ``latest_universal``."""
    if store.entry is not None:
        return False
    return store.exists(LATEST) or any(store.exists(f"{ZERO}/{name}/{FP32}.pt") for name in store.folders(ZERO))


def _folder(store: ReadStore) -> str:
    """Path before the checkpoint's files: empty, or the directory that ``latest_universal`` names and ``/``."""
    if store.folders(ZERO) or not store.exists(LATEST):
        return ""
    text = store.read(LATEST, 0, min(store.size(LATEST), _MAX_NAME_BYTES)).decode("utf-8", "replace").strip()
    name = checked_name(text, found_in=LATEST)
    if not store.folders(f"{name}/{ZERO}"):
        raise MissingShardError(
            f"{LATEST} names {name[:80]!r}, which holds no universal checkpoint",
            file=LATEST,
            hint="copy the checkpoint again, with all its files",
        )
    return f"{name}/"


def read(store: ReadStore) -> Catalog:
    """The catalog of a universal checkpoint, or of the one that a root names.

    Raises:
        MissingShardError: a parameter has no weights.
        CorruptError: files contradict themselves or each other.
        UnsafeError: a hostile pickle or name.
    """
    folder = _folder(store)
    names = store.folders(folder + ZERO)
    models = _models(store, folder)
    model = models[0] if models else None
    notes: list[str] = []
    groups = list(model.groups or ()) if model is not None else []
    shapes = {name: shape for group in groups for name, shape in group.items()}
    if model is None:
        notes.append("there are no model states: no names of groups, no client state; DeepSpeed cannot load it")
    weights: dict[str, Held] = {} if model is None else buffers(model)
    states: dict[str, dict[str, object]] = {}
    extras: dict[str, object] = {}
    shared = {} if model is None else model.shared
    for name in [*(name for name in shapes if name in set(names)), *(name for name in names if name not in shapes)]:
        if name in shared and shared[name] in names:
            continue
        entry = _parameter(store, f"{folder}{ZERO}/{name}", name, shapes.get(name))
        weights[name] = entry.weight
        if entry.states:
            states[name] = entry.states
        if entry.extras:
            extras[name] = entry.extras
    _check_all_there(weights, shapes, folder)
    if model is not None:
        if all(found.fragments for found in models):
            weights |= {
                name: held for name, held in frozen(models, 3 if _is_zero3(model) else 2).items() if name not in weights
            }
        weights, aliases = with_shared(model, weights)
    else:
        aliases = {}
    files = [found.state for found in models[:1]]
    optimizer: dict[str, object] = {}
    param_groups: Sequence[Mapping[object, object]] = ()
    if store.exists(folder + OPTIMIZER_FILE):
        state = read_state_file(store, folder + OPTIMIZER_FILE)
        files.append(state)
        param_groups = _param_groups(state)
        optimizer = {
            str(name): value
            for name, value in state.root.items()
            if name not in CONSUMED_OPTIM and name not in (PARAM_GROUPS, STATE)
        }
        _add_steps(state, groups, states)
    else:
        notes.append(f"there is no {OPTIMIZER_FILE}; DeepSpeed cannot load it")
    beside = {} if model is None else dict(model.beside)
    tree = tree_of(
        weights=weights,
        states=states,
        groups=group_trees(param_groups, {number: list(group) for number, group in enumerate(groups)}),
        optimizer=optimizer,
        beside=beside,
    )
    if extras:
        tree[EXTRAS] = {name: Whole(value) for name, value in extras.items()}
    attrs: dict[str, object] = {"aliases": aliases, "notes": notes}
    return assembled(
        tree,
        format="deepspeed_universal",
        version=None if model is None else version_of(model),
        files=files,
        attrs=attrs if model is None else attrs | iteration_of(model),
    )


def _models(store: ReadStore, folder: str) -> list[ModelStates]:
    """The model files: the one of model-parallel rank 0, or those of ZeRO-3 by rank; [] if there are none."""
    if store.exists(folder + MODEL_FILE):
        return [model_states(read_state_file(store, folder + MODEL_FILE), is_universal=True)]
    found: list[ModelStates] = []
    while store.exists(name := folder + ZERO_MODEL_FILE.replace("rank_0", f"rank_{len(found)}", 1)):
        found.append(model_states(read_state_file(store, name), is_universal=True))
    return found


def _is_zero3(model: ModelStates) -> bool:
    return ZERO_MODEL_FILE in model.state.file


def _check_all_there(weights: Mapping[str, Held], shapes: Mapping[str, Shape], folder: str) -> None:
    for name in shapes:
        if name not in weights:
            raise MissingShardError(
                "the model states list the parameter, but its directory is not there",
                file=f"{folder}{ZERO}/{name}",
                key=name,
                hint="copy the checkpoint again, with all its files",
            )


@dataclass(frozen=True, slots=True)
class _Parameter:
    """What the directory of a parameter holds.

    Args:
        weight: its masters.
        states: state name → ``Held`` or ``Whole``.
        extras: how tensor parallelism cuts it; {} where it does so in the usual way.
    """

    weight: Held
    states: dict[str, object]
    extras: Mapping[str, object]


def _parameter(store: ReadStore, folder: str, name: str, shape: Shape | None) -> _Parameter:
    """Reads the directory of a parameter.

    Args:
        shape: as the model states have it; bare tensors get it.
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
            weight, extras = found, beside
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
    return _Parameter(held_whole(weight), states, {} if usual else extras)


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
    if prod(array.shape) != prod(shape) or array.extent is None or array.extent.strides is not None:
        raise CorruptError(
            f"the tensor has {prod(array.shape)} elements, the model states give it the shape {shape}", file=file
        )
    return reshaped(array, shape)


def _param_groups(state: StateFile) -> list[Mapping[object, object]]:
    """The settings of the optimizer's groups, without those that only fill the list up."""
    found = state.root.get(PARAM_GROUPS)
    if found is None:
        found = (as_mapping(state.root.get(OPTIMIZER_STATE)) or {}).get(PARAM_GROUPS) or []
    groups = [state.mapping(group, PARAM_GROUPS) for group in state.items(found, PARAM_GROUPS)]
    return [group for group in groups if dict(group) != {PARAMS: []}]


def _add_steps(state: StateFile, groups: Sequence[Mapping[str, Shape]], states: dict[str, dict[str, object]]) -> None:
    """The steps of a checkpoint that has them by group, as ZeRO-3 does."""
    found = (as_mapping(state.root.get(OPTIMIZER_STATE)) or {}).get(STATE)
    by_number = as_mapping(found) or {}
    for number, names in enumerate(groups):
        step = (as_mapping(by_number.get(number)) or {}).get(STEP)
        if step is None:
            continue
        made = held_whole(state.arrays[step.key]) if isinstance(step, TensorLeaf) else Whole(step)
        for name in names:
            if name in states:
                states[name].setdefault(STEP, made)


FORMAT = Format(
    name="deepspeed_universal",
    title="DeepSpeed universal",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    aliases=("ucp",),
    has_objects_beside=True,
    adapt=for_universal,
)
