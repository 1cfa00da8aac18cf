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

Read: what ``ds_to_universal.py`` writes, for ZeRO-1 and 2 (dicts, as above) and for ZeRO-3 (bare
flat tensors, whose shapes stand in the model files, and the step in ``optimizer_state.pt`` alone).
Keys are those of ``core.formats.deepspeed.tree``, so that a checkpoint and its universal form have
the same catalog. How parameters were cut by tensor parallelism (``cat_dim`` other than 0,
``vocab_tensor``, ``sub_param_shape`` …) becomes the object ``universal.<parameter>``.

Written: always dicts with whole shapes, and what the loaders of all stages look for, so that one
checkpoint loads with every stage (0.19.8; ZeRO-3 of 0.17.0 reads bare tensors only, so it fails on
these, ZeRO-1 and 2 do not). Objects: ``optimizer.param_groups…`` and every other ``optimizer.…`` go
to ``optimizer_state.pt``, ``universal.…`` into the parameters' files, all others to
``mp_rank_00_model_states.pt``; classes that the loader could not import are put aside
(``core.formats.torch.weights_only``). Shared parameters are recorded, not repeated. 16-bit weights
are refused: DeepSpeed would take them for masters.

Not carried: what describes the partition of the run that saved (``group_paddings`` …), and the
model file's 16-bit ``module``, which the loader does not look at.

``Catalog.iteration`` and the facet ``ZeroFacts`` are of the run that saved.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``, ``runtime/engine.py``
(``load_checkpoint``); checkpoints that it wrote, pinned in tests/golden (``deepspeed_universal``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from core.errors import MissingShardError
from core.files.store import check_name
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.model_states import (
    ModelStates,
    iteration_of,
    parse_model_states,
    version_of,
)
from core.formats.deepspeed.optim_states import CONSUMED_OPTIM, OPTIMIZER_STATE, enum_number
from core.formats.deepspeed.pieces import UnkeyedTensor, tensor_of_array
from core.formats.deepspeed.state_file import StateFile, read_state_file
from core.formats.deepspeed.tree import (
    PARAM_GROUPS,
    PARAMS,
    STATE,
    WholeObject,
    assemble_catalog,
    group_trees,
    tree_of,
)
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
from core.formats.deepspeed.universal.parameter import (
    UniversalParameter,
    lacking_files,
    read_parameter,
)
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
    """Return whether the directory is a universal checkpoint, or names one in
    ``latest_universal``.
    """
    if store.entry is not None:
        return False
    return store.exists(LATEST) or any(
        store.exists(f"{ZERO}/{name}/{FP32}.pt") for name in store.folders(ZERO)
    )


def _folder(store: ReadStore) -> str:
    """Return the path before the checkpoint's files: "", or the directory in ``latest_universal``
    and ``/``.
    """
    if store.folders(ZERO) or not store.exists(LATEST):
        return ""
    text = (
        store.read(LATEST, 0, min(store.size(LATEST), _MAX_NAME_BYTES))
        .decode("utf-8", "replace")
        .strip()
    )
    name = check_name(text, found_in=LATEST)
    if not store.folders(f"{name}/{ZERO}"):
        raise MissingShardError(
            f"{LATEST} names {name[:80]!r}, which is not a universal checkpoint",
            file=LATEST,
            hint="copy the checkpoint again, with all its files",
        )
    return f"{name}/"


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a universal checkpoint, or of the one that a root names.

    Raises:
        MissingShardError: a parameter has no weights, or lacks a state that most others have.
        CorruptError: files contradict themselves or each other.
        UnsafeError: a pickle or a name is hostile.
    """
    folder = _folder(store)
    models = _models(store, folder)
    model = models[0] if models else None
    groups: Sequence[Shapes] = (model.groups or ()) if model is not None else ()
    optim = (
        read_state_file(store, folder + OPTIMIZER_FILE)
        if store.exists(folder + OPTIMIZER_FILE)
        else None
    )

    # Every parameter has a directory with its weights and states.
    parameters = _parameters(store, folder, groups, model)
    _check_complete(folder, parameters)
    weights, aliases = _weights(models, parameters)
    states = {name: parameter.states for name, parameter in parameters.items() if parameter.states}
    if optim is not None:
        states = _with_group_steps(optim, groups, states)

    # The tree gives keys and skeleton.
    values = {} if optim is None else dict(_optimizer_values(optim))
    tree = tree_of(
        weights=weights,
        states=states,
        groups=group_trees(
            _param_groups(optim), {number: list(group) for number, group in enumerate(groups)}
        ),
        optimizer={
            name: value for name, value in values.items() if name not in (PARAM_GROUPS, STATE)
        },
        beside={} if model is None else model.beside,
    )
    extras = {
        name: WholeObject(parameter.extras)
        for name, parameter in parameters.items()
        if parameter.extras
    }
    if extras:
        tree[EXTRAS] = extras
    catalog = assemble_catalog(
        tree,
        format="deepspeed_universal",
        version=None if model is None else version_of(model),
        files=[
            *(states_file.state for states_file in models[:1]),
            *(() if optim is None else (optim,)),
        ],
    )
    return replace(
        catalog,
        iteration=None if model is None else iteration_of(model),
        aliases=aliases,
        notes=tuple(_notes(model, optim)),
    ).with_facet(_facts(model, optim))


def _check_complete(folder: str, parameters: Mapping[str, UniversalParameter]) -> None:
    """Raise if a parameter lacks a file that most others have.

    Raises:
        MissingShardError: names the first such file.
    """
    stored = {
        name: [f"{stem}.pt" for stem in (FP32, *parameter.states)]
        for name, parameter in parameters.items()
    }
    for name, file in lacking_files(stored):
        raise MissingShardError(
            "the parameter's directory lacks a file that the others have",
            file=f"{folder}{ZERO}/{name}/{file}",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )


def _weights(
    models: Sequence[ModelStates], parameters: Mapping[str, UniversalParameter]
) -> tuple[dict[str, UnkeyedTensor], dict[str, str]]:
    """Return the weights, with buffers and frozen parameters, and shared name → owner."""
    weights = buffers(models[0]) if models else {}
    weights |= {name: parameter.weight for name, parameter in parameters.items()}
    if not models:
        return weights, {}
    if all(model.fragments for model in models):
        stage = 3 if ZERO_MODEL_FILE in models[0].state.file else 2
        weights |= {
            name: tensor for name, tensor in frozen(models, stage).items() if name not in weights
        }
    return with_shared(models[0], weights)


def _facts(model: ModelStates | None, optim: StateFile | None) -> ZeroFacts:
    """Return the stage and the number of data-parallel ranks of the run that saved."""
    dp = None if model is None else model.state.root.get("dp_world_size")
    stage = None if optim is None else enum_number(optim.root.get("zero_stage"))
    return ZeroFacts(stage=stage, dp=dp if type(dp) is int else None)


def _optimizer_values(optim: StateFile) -> Iterator[tuple[str, object]]:
    """Return the optimizer's values, without facts about the partition."""
    return ((str(name), value) for name, value in optim.root.items() if name not in CONSUMED_OPTIM)


def _notes(model: ModelStates | None, optim: StateFile | None) -> list[str]:
    """Return notes on missing files."""
    notes = []
    if model is None:
        notes.append(
            "there are no model states, so no client state and no names of groups; DeepSpeed cannot load it"
        )
    if optim is None:
        notes.append(f"there is no {OPTIMIZER_FILE}; DeepSpeed cannot load it")
    return notes


def _parameters(
    store: ReadStore, folder: str, groups: Sequence[Shapes], model: ModelStates | None
) -> dict[str, UniversalParameter]:
    """Read the directory of every parameter: those of the optimizer's groups first, in their order.

    Raises:
        MissingShardError: the model states list a parameter without a directory.
    """
    shared = {} if model is None else model.shared
    is_uncut = model is not None and model.state.root.get("mp_world_size") == 1
    names = dict.fromkeys(store.folders(folder + ZERO))
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for name in shapes:
        if name not in names:
            raise MissingShardError(
                "the model states list the parameter, but its directory is missing",
                file=f"{folder}{ZERO}/{name}",
                key=name,
                hint="copy the checkpoint again, with all its files",
            )
    return {
        name: read_parameter(
            store, f"{folder}{ZERO}/{name}", name, shapes.get(name), is_uncut=is_uncut
        )
        for name in {**dict.fromkeys(shapes), **names}
        if shared.get(name) not in names or shared[name] in shared
    }


def _models(store: ReadStore, folder: str) -> list[ModelStates]:
    """Read the model files: that of model-parallel rank 0, or those of ZeRO-3 by rank.

    [] if there are none.
    """
    if store.exists(folder + MODEL_FILE):
        return [parse_model_states(read_state_file(store, folder + MODEL_FILE), is_universal=True)]
    models: list[ModelStates] = []
    while store.exists(
        name := folder + ZERO_MODEL_FILE.replace("rank_0", f"rank_{len(models)}", 1)
    ):
        models.append(parse_model_states(read_state_file(store, name), is_universal=True))
    return models


def _param_groups(state: StateFile | None) -> list[Mapping[object, object]]:
    """Return the settings of the optimizer's groups, without empty ones that only fill the list."""
    if state is None:
        return []
    stated = state.root.get(PARAM_GROUPS)
    if stated is None:
        stated = (as_mapping(state.root.get(OPTIMIZER_STATE)) or {}).get(PARAM_GROUPS) or []
    groups = [state.mapping(group, PARAM_GROUPS) for group in state.items(stated, PARAM_GROUPS)]
    return [group for group in groups if dict(group) != {PARAMS: []}]


def _with_group_steps(
    optim: StateFile, groups: Sequence[Shapes], states: Mapping[str, Mapping[str, object]]
) -> dict[str, dict[str, object]]:
    """Return the states with the steps of a checkpoint that has them by group, as ZeRO-3 does."""
    by_name = {name: dict(entries) for name, entries in states.items()}
    by_number = as_mapping((as_mapping(optim.root.get(OPTIMIZER_STATE)) or {}).get(STATE)) or {}
    for number, names in enumerate(groups):
        step = (as_mapping(by_number.get(number)) or {}).get(STEP)
        if step is None:
            continue
        entry = (
            tensor_of_array(optim.arrays[step.key])
            if isinstance(step, TensorLeaf)
            else WholeObject(step)
        )
        for name in names:
            if name in by_name:
                by_name[name].setdefault(STEP, entry)
    return by_name


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
