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
``core.formats.deepspeed.tree``, so that a checkpoint and its universal form have the same catalog. How parameters were
cut by tensor parallelism (``cat_dim`` other than 0, ``vocab_tensor``, ``sub_param_shape`` …) becomes the object
``universal.<parameter>``.

Written: always dicts with whole shapes, and what the loaders of all stages look for, so that one checkpoint loads with
every stage (0.19.8; ZeRO-3 of 0.17.0 reads bare tensors only, so it fails on these, ZeRO-1 and 2 do not). Objects:
``optimizer.param_groups…`` and every other ``optimizer.…`` go to ``optimizer_state.pt``, ``universal.…`` into the
parameters' files, all others to ``mp_rank_00_model_states.pt``; classes that the loader could not import are put aside
(``core.formats.torch.weights_only``). Shared parameters are recorded, not repeated. 16-bit weights are refused:
DeepSpeed would take them for masters.

Not carried: what describes the partition of the run that saved (``group_paddings`` …), and the model file's 16-bit
``module``, which the loader does not look at.

``Catalog.iteration`` and the facet ``ZeroFacts`` are of the run that saved.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``, ``runtime/engine.py`` (``load_checkpoint``); checkpoints that
it wrote, pinned in tests/golden (``deepspeed_universal``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from core.errors import MissingShardError
from core.files.store import check_name
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.model_states import ModelStates, iteration_of, model_states, version_of
from core.formats.deepspeed.optim_states import CONSUMED_OPTIM, OPTIMIZER_STATE, enum_number
from core.formats.deepspeed.pieces import held_whole
from core.formats.deepspeed.state_file import StateFile, read_state_file
from core.formats.deepspeed.tree import PARAM_GROUPS, PARAMS, STATE, Whole, assembled, group_trees, tree_of
from core.formats.deepspeed.universal.names import (
    EXTRAS,
    FP32,
    LATEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PACKAGES,
    STEP,
    ZERO,
    ZERO_MODEL_FILE,
)
from core.formats.deepspeed.universal.parameter import Parameter, lacking_files, read_parameter
from core.formats.deepspeed.universal.source import for_universal
from core.formats.deepspeed.universal.write import check, lay_out
from core.formats.deepspeed.weights import buffers, frozen, with_shared
from core.formats.format import Format
from core.formats.torch.refused import aside_notes
from core.pickle.inert import TensorLeaf, as_mapping

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.formats.deepspeed.partition import Shapes

__all__ = ["FORMAT", "check", "for_universal", "lay_out", "read", "sniff"]

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
    name = check_name(text, found_in=LATEST)
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
        MissingShardError: a parameter has no weights, or lacks a state that most others have.
        CorruptError: files contradict themselves or each other.
        UnsafeError: a hostile pickle or name.
    """
    folder = _folder(store)
    models = _models(store, folder)
    model = models[0] if models else None
    groups: Sequence[Shapes] = (model.groups or ()) if model is not None else ()
    parameters = _parameters(store, folder, groups, model)
    weights = {} if model is None else buffers(model)
    weights |= {name: parameter.weight for name, parameter in parameters.items()}
    stored = {name: [f"{stem}.pt" for stem in (FP32, *parameter.states)] for name, parameter in parameters.items()}
    for name, file in lacking_files(stored):
        raise MissingShardError(
            "the parameter's directory lacks a file that those of the others have",
            file=f"{folder}{ZERO}/{name}/{file}",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )
    states = {name: parameter.states for name, parameter in parameters.items() if parameter.states}
    aliases: dict[str, str] = {}
    if model is not None:
        if all(found.fragments for found in models):
            stage = 3 if ZERO_MODEL_FILE in model.state.file else 2
            weights |= {name: held for name, held in frozen(models, stage).items() if name not in weights}
        weights, aliases = with_shared(model, weights)
    optim = read_state_file(store, folder + OPTIMIZER_FILE) if store.exists(folder + OPTIMIZER_FILE) else None
    if optim is not None:
        _add_steps(optim, groups, states)
    tree = tree_of(
        weights=weights,
        states=states,
        groups=group_trees(_param_groups(optim), {number: list(group) for number, group in enumerate(groups)}),
        optimizer={} if optim is None else {n: v for n, v in _named(optim) if n not in (PARAM_GROUPS, STATE)},
        beside={} if model is None else model.beside,
    )
    extras = {name: Whole(found.extras) for name, found in parameters.items() if found.extras}
    if extras:
        tree[EXTRAS] = extras
    dp = None if model is None else model.state.root.get("dp_world_size")
    facts = ZeroFacts(
        stage=None if optim is None else enum_number(optim.root.get("zero_stage")), dp=dp if type(dp) is int else None
    )
    catalog = assembled(
        tree,
        format="deepspeed_universal",
        version=None if model is None else version_of(model),
        files=[found.state for found in models[:1]] + ([] if optim is None else [optim]),
    )
    return replace(
        catalog,
        iteration=None if model is None else iteration_of(model),
        aliases=aliases,
        notes=tuple(_notes(model, optim)),
    ).with_facet(facts)


def _named(optim: StateFile) -> Iterator[tuple[str, object]]:
    """What the optimizer keeps beside the facts about the partition."""
    return ((str(name), value) for name, value in optim.root.items() if name not in CONSUMED_OPTIM)


def _notes(model: ModelStates | None, optim: StateFile | None) -> list[str]:
    notes = []
    if model is None:
        notes.append("there are no model states, so no client state and no names of groups; DeepSpeed cannot load it")
    if optim is None:
        notes.append(f"there is no {OPTIMIZER_FILE}; DeepSpeed cannot load it")
    return notes


def _parameters(
    store: ReadStore, folder: str, groups: Sequence[Shapes], model: ModelStates | None
) -> dict[str, Parameter]:
    """Every directory of a parameter: those of the optimizer's groups first, in their order.

    Raises:
        MissingShardError: the model states list a parameter that has none.
    """
    shared = {} if model is None else model.shared
    is_uncut = model is not None and model.state.root.get("mp_world_size") == 1
    names = dict.fromkeys(store.folders(folder + ZERO))
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for name in shapes:
        if name not in names:
            raise MissingShardError(
                "the model states list the parameter, but its directory is not there",
                file=f"{folder}{ZERO}/{name}",
                key=name,
                hint="copy the checkpoint again, with all its files",
            )
    return {
        name: read_parameter(store, f"{folder}{ZERO}/{name}", name, shapes.get(name), is_uncut=is_uncut)
        for name in {**dict.fromkeys(shapes), **names}
        if shared.get(name) not in names or shared[name] in shared
    }


def _models(store: ReadStore, folder: str) -> list[ModelStates]:
    """The model files: the one of model-parallel rank 0, or those of ZeRO-3 by rank; [] if there are none."""
    if store.exists(folder + MODEL_FILE):
        return [model_states(read_state_file(store, folder + MODEL_FILE), is_universal=True)]
    found: list[ModelStates] = []
    while store.exists(name := folder + ZERO_MODEL_FILE.replace("rank_0", f"rank_{len(found)}", 1)):
        found.append(model_states(read_state_file(store, name), is_universal=True))
    return found


def _param_groups(state: StateFile | None) -> list[Mapping[object, object]]:
    """The settings of the optimizer's groups, without those that only fill the list up."""
    if state is None:
        return []
    found = state.root.get(PARAM_GROUPS)
    if found is None:
        found = (as_mapping(state.root.get(OPTIMIZER_STATE)) or {}).get(PARAM_GROUPS) or []
    groups = [state.mapping(group, PARAM_GROUPS) for group in state.items(found, PARAM_GROUPS)]
    return [group for group in groups if dict(group) != {PARAMS: []}]


def _add_steps(state: StateFile, groups: Sequence[Shapes], states: dict[str, dict[str, object]]) -> None:
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
    check=check,
    records_ties=True,
    notes_of=partial(aside_notes, packages=PACKAGES),
)
