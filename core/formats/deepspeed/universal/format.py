"""DeepSpeed's universal checkpoint: one directory per parameter, free of ranks.

On disk::

    latest_universal                          name of the directory
    global_step10_universal/
    ├── mp_rank_00_model_states.pt            client state; ZeRO-0, 1 and 2 load this file …
    ├── zero_pp_rank_0_mp_rank_00_model_states.pt
    │                                         … and ZeRO-3 loads this one
    └── zero/
        ├── optimizer_state.pt                param_groups, loss scaler; for ZeRO-3 also the step
        └── <parameter>/
            ├── fp32.pt                       {"cat_dim": 0, "param": tensor};
            │                                 of a buffer: {"param": tensor}
            ├── exp_avg.pt, exp_avg_sq.pt …   the same for each state of the optimizer
            └── step.pt                       a bare tensor or number

Read: checkpoints written by ``ds_to_universal.py``, from ZeRO-1 and 2 (dicts, as above) and from
ZeRO-3 (bare flat tensors, with their shapes in the model files and the step only in
``optimizer_state.pt``). Keys are those of ``core.formats.deepspeed.tree``, so that a checkpoint and
its universal form have the same catalog. The description of a parameter's tensor-parallel sharding
(``cat_dim`` other than 0, ``vocab_tensor``, ``sub_param_shape`` …) becomes the object
``universal.<parameter>``.

Written: always dicts with complete shapes, and every file that the loader of any stage needs, so
that one checkpoint loads with every stage (0.19.8; in 0.17.0, ZeRO-1 and 2 load it, but ZeRO-3
fails, as it reads bare tensors only). Objects: ``optimizer.param_groups…`` and all other
``optimizer.…`` go to ``optimizer_state.pt``, ``universal.…`` to the files of parameters, all others
to ``mp_rank_00_model_states.pt``; objects of classes that the loader cannot import are put into a
separate file (``core.formats.torch.weights_only``). Shared parameters are recorded, not repeated.
16-bit weights are refused, as DeepSpeed would use them as master weights. Experts for a larger EP
size: ``core.formats.deepspeed.universal.expert_parallel``.

Not carried: facts about the partition of the run that saved (``group_paddings`` …), and the model
file's 16-bit ``module``, which the loader ignores; the latter is listed.

``Catalog.iteration`` and the facet ``ZeroFacts`` describe the run that saved.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``, ``runtime/engine.py``
(``load_checkpoint``); checkpoints that it wrote, pinned in tests/golden (``deepspeed_universal``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.dropped import dropped_together, dropped_unlisted
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Tensor, whole_tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import check_name
from core.formats.deepspeed.model_states import (
    ModelStates,
    ZeroFacts,
    find_iteration,
    parse_model_states,
    version_of,
)
from core.formats.deepspeed.state_file import StateFile, read_state_file
from core.formats.deepspeed.tree import (
    EXTRAS,
    OPTIMIZER,
    PARAM_GROUPS,
    PARAMS,
    STATE,
    WholeObject,
    assemble_catalog,
    build_state_tree,
    group_trees,
)
from core.formats.deepspeed.universal.expert_parallel import (
    cut_experts,
    directories,
    expert_notes,
    part_of_stack,
    recorded_ep,
)
from core.formats.deepspeed.universal.parameter import (
    FP32,
    LATEST,
    MASTER,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PACKAGES,
    STEP,
    STEP_COPY,
    ZERO,
    ZERO_MODEL_FILE,
    split_state_path,
)
from core.formats.deepspeed.universal.write import check, lay_out
from core.formats.format import Format, imported_on_call
from core.formats.torch.weights_only import aside_notes
from core.pickle.fields import int_or_none, mapping_or_empty
from core.pickle.inert import TensorLeaf

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog, TargetCatalog
    from core.files.store import ReadStore
    from core.formats.deepspeed.partition import Shapes
    from core.formats.deepspeed.universal.parameter import UniversalParameter

__all__ = ["FORMAT", "check", "for_universal", "lay_out", "read", "read_weights", "sniff"]

_MAX_NAME_BYTES = 4096
_COPIES = "copies of weights in the model file, which DeepSpeed ignores"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory is a universal checkpoint, or has a ``latest_universal``."""
    if store.entry is not None:
        return False
    return store.exists(LATEST) or any(
        store.exists(f"{ZERO}/{name}/{FP32}.pt") for name in store.folders(ZERO)
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a universal checkpoint, or of the one that ``latest_universal`` names.

    Raises:
        MissingShardError: a parameter has no weights, or lacks a state that most others have.
        CorruptError: a file is malformed, or files contradict each other.
        UnsupportedError: a file is not a torch file that can be read.
        UnsafeError: a pickle or a name is hostile.
    """
    from core.formats.deepspeed.weights import advise_no_optim

    try:
        return _read(store)
    except (CorruptError, UnsupportedError) as err:
        advise_no_optim(err, store, read_weights, "uses the weights in each parameter's fp32.pt")
        raise


def read_weights(store: ReadStore) -> Catalog:
    """Read the catalog of the weights alone: the files of the optimizer's states are not opened.

    Raises:
        MissingShardError, CorruptError, UnsupportedError, UnsafeError: as for ``read``.
    """
    return _read(store, has_optimizer=False)


def _read(store: ReadStore, *, has_optimizer: bool = True) -> Catalog:
    """Read the catalog of all files, or of those without the optimizer; raises as ``read``."""
    from core.formats.deepspeed.optim_states import CONSUMED_OPTIM, enum_number

    folder = _folder(store)
    # Model states and the optimizer's file may be missing; their entries are then empty.
    models = _models(store, folder)
    model = models[0] if models else _NO_MODEL
    groups: Sequence[Shapes] = model.groups or ()
    has_optim = store.exists(folder + OPTIMIZER_FILE)
    optim = (
        read_state_file(store, folder + OPTIMIZER_FILE)
        if has_optim and has_optimizer
        else StateFile(OPTIMIZER_FILE, {}, {})
    )
    notes = []
    if not models:
        notes.append(
            "the model states file is missing, so there is no client state and there are no group "
            "names, and DeepSpeed cannot load the checkpoint"
        )
    if not has_optim:
        notes.append(f"{OPTIMIZER_FILE} is missing, so DeepSpeed cannot load the checkpoint")

    # Every parameter has a directory with its weights and states.
    parameters = _parameters(store, folder, groups, model, has_states=has_optimizer)
    _check_complete(folder, parameters)
    weights = _weights(models, parameters)

    # The tree defines keys and skeleton. Settings are listed separately from the optimizer's other
    # values; facts about the partition of the run that saved are not carried.
    consumed = {*CONSUMED_OPTIM, PARAM_GROUPS, STATE}
    tree = build_state_tree(
        weights=weights,
        states=_states(optim, groups, parameters),
        groups=group_trees(
            _param_groups(optim), {number: list(group) for number, group in enumerate(groups)}
        ),
        optimizer={str(name): value for name, value in optim.root.items() if name not in consumed},
        other_entries=model.other_entries,
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
        version=version_of(model),
        files=[model.state, optim],
    )
    facts = ZeroFacts(
        stage=enum_number(optim.root.get("zero_stage")),
        dp=int_or_none(model.state.root.get("dp_world_size")),
    )
    # Buffers and frozen parameters are read from the model file; that of ZeRO-3 has no others.
    copies = (
        f"module.{name}"
        for name, array in model.module.items()
        if array.n_bytes and name not in model.buffers and name not in model.frozen
    )
    dropped = (*model.dropped, *dropped_together(copies, _COPIES))
    return replace(
        catalog,
        iteration=find_iteration(model),
        notes=tuple(notes),
        dropped=dropped,
    ).with_facet(facts)


_NO_MODEL = ModelStates(StateFile(MODEL_FILE, {}, {}), {}, (), None, {}, {}, {})
"""Stands for missing model states."""


def _folder(store: ReadStore) -> str:
    """Return the prefix of the checkpoint's files: "", or the directory in ``latest_universal``.

    Raises:
        MissingShardError: that directory is not a universal checkpoint.
        UnsafeError: its name leads outside the root.
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
            hint=f"pass the directory of the universal checkpoint itself, or write its name into "
            f"{LATEST}",
        )
    return f"{name}/"


def _models(store: ReadStore, folder: str) -> list[ModelStates]:
    """Read the model files: one, or those of ZeRO-3 by rank; [] if there are none."""
    if store.exists(folder + MODEL_FILE):
        return [parse_model_states(read_state_file(store, folder + MODEL_FILE), is_universal=True)]
    models: list[ModelStates] = []
    while store.exists(
        name := folder + ZERO_MODEL_FILE.replace("rank_0", f"rank_{len(models)}", 1)
    ):
        models.append(parse_model_states(read_state_file(store, name), is_universal=True))
    return models


def _check_complete(folder: str, parameters: Mapping[str, UniversalParameter]) -> None:
    """Raise if a parameter lacks a file that most others have.

    Raises:
        MissingShardError: names the first such file.
    """
    from core.formats.deepspeed.universal.parameter import lacking_files

    stored = {
        name: [f"{stem}.pt" for stem in (FP32, *parameter.states)]
        for name, parameter in parameters.items()
    }
    for name, file in lacking_files(stored):
        raise MissingShardError(
            "a file that most other parameters have is missing",
            file=f"{folder}{ZERO}/{name}/{file}",
            key=name,
            hint="copy the checkpoint again, with all its files",
        )


def _weights(
    models: Sequence[ModelStates], parameters: Mapping[str, UniversalParameter]
) -> dict[str, Tensor]:
    """Return all weights, including buffers, frozen and shared parameters."""
    from core.formats.deepspeed.weights import buffers, frozen, with_shared

    weights = buffers(models[0]) if models else {}
    weights |= {name: parameter.weight for name, parameter in parameters.items()}
    if not models:
        return weights
    # Frozen parameters are in the model files, unless the tool has given them directories.
    if all(model.fragments for model in models):
        stage = 3 if ZERO_MODEL_FILE in models[0].state.file else 2
        weights |= {
            name: tensor for name, tensor in frozen(models, stage).items() if name not in weights
        }
    return with_shared(models[0], weights)


def _parameters(
    store: ReadStore,
    folder: str,
    groups: Sequence[Shapes],
    model: ModelStates,
    *,
    has_states: bool,
) -> dict[str, UniversalParameter]:
    """Read the directory of every parameter, first those of the optimizer's groups in their order.

    Args:
        has_states: as for ``read_parameter``.

    Raises:
        MissingShardError: the model states list a parameter without a directory.
        CorruptError: files of a parameter are damaged, or contradict each other.
    """
    from core.formats.deepspeed.experts import split_expert_name
    from core.formats.deepspeed.universal.parameter import read_parameter

    info = mapping_or_empty(model.state.root.get("universal_checkpoint_info"))
    ep = recorded_ep(info, file=model.state.file)
    names = directories(store.folders(folder + ZERO), ep=ep)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for name in shapes:
        if name not in names:
            raise MissingShardError(
                "the model states list the parameter, but its directory is missing",
                file=f"{folder}{ZERO}/{name}",
                key=name,
                hint="copy the checkpoint again, with all its files",
            )
    # A shared parameter is tied to its owner, also if it has a directory of its own.
    is_uncut = model.state.root.get("mp_world_size") == 1
    parameters = {}
    for name in {**dict.fromkeys(shapes), **names}:
        if model.shared.get(name) in names and model.shared[name] not in model.shared:
            continue
        directory, ep_rank = names[name]
        path, shape = f"{folder}{ZERO}/{directory}", shapes.get(name)
        is_stack = ep > 1 and split_expert_name(name) is not None
        if is_stack and shape:
            shape = (ep * shape[0], *shape[1:])
        parameter = read_parameter(
            store, path, name, shape, is_uncut=is_uncut, has_states=has_states
        )
        if is_stack:
            parameter = part_of_stack(parameter, ep_rank, ep=ep, folder=path)
        parameters[name] = parameter
    return parameters


def _param_groups(optim: StateFile) -> list[Mapping[object, object]]:
    """Return the settings of the optimizer's groups, without the empty ones that extend the list.

    Raises:
        CorruptError: the settings are not a list of dicts.
    """
    from core.formats.deepspeed.optim_states import OPTIMIZER_STATE

    stored = optim.root.get(PARAM_GROUPS)
    if stored is None:
        stored = mapping_or_empty(optim.root.get(OPTIMIZER_STATE)).get(PARAM_GROUPS) or []
    reader = optim.fields
    items = reader.read_list(stored, PARAM_GROUPS)
    groups = [reader.read_mapping(group, PARAM_GROUPS) for group in items]
    return [group for group in groups if dict(group) != {PARAMS: []}]


def _states(
    optim: StateFile, groups: Sequence[Shapes], parameters: Mapping[str, UniversalParameter]
) -> dict[str, dict[str, object]]:
    """Return the states by parameter, with the steps that ZeRO-3 stores by group added."""
    from core.formats.deepspeed.optim_states import OPTIMIZER_STATE

    states = {
        name: dict(parameter.states) for name, parameter in parameters.items() if parameter.states
    }
    by_number = mapping_or_empty(mapping_or_empty(optim.root.get(OPTIMIZER_STATE)).get(STATE))
    for number, names in enumerate(groups):
        step = mapping_or_empty(by_number.get(number)).get(STEP)
        if step is None:
            continue
        entry = (
            whole_tensor(optim.arrays[step.key])
            if isinstance(step, TensorLeaf)
            else WholeObject(step)
        )
        # A parameter's own step takes precedence; parameters without states are not trained.
        for name in names:
            if name in states:
                states[name].setdefault(STEP, entry)
    return states


def _notes_of(target: TargetCatalog) -> list[str]:
    """Return notes on experts and on objects that are set aside."""
    return [*expert_notes(target), *aside_notes(target, packages=PACKAGES)]


NO_STATE = (
    "there is no optimizer state, so ZeRO-1 and ZeRO-2 load only the weights, and ZeRO-3 can load "
    "them only with load_module_only=True; training starts with fresh optimizer moments"
)


def for_universal(catalog: Catalog) -> Catalog:
    """Return the source with the tensors that a universal checkpoint stores.

    Call this before the target catalog is created. Master weights
    (``optimizer.state.<name>.fp32_param``) replace the weights, one of the steps is added a second
    time (``STEP_COPY``), and notes list what DeepSpeed will miss.

    Args:
        catalog: global tensors under their final names, with objects loaded.
    """
    state_of_key = {
        key: state_key
        for key in catalog.tensors
        if (state_key := split_state_path(key, catalog.tensors)) is not None
    }
    # Master weights take the names of the weights and of those tied to them, and stop being states.
    # Of the other states, each is a tensor of its own.
    masters = {name: key for key, (state, name) in state_of_key.items() if state == MASTER}
    master_of = {
        id(catalog.tensors[name]): catalog.tensors[key]
        for name, key in masters.items()
        if name in catalog.tensors
    }
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        if key in masters:
            tensors[key] = catalog.tensors[masters[key]]
        elif state_of_key.get(key, ("", ""))[0] != MASTER:
            is_state = is_optimizer_key(key)
            tensors[key] = replace(tensor) if is_state else master_of.get(id(tensor), tensor)
    # ZeRO-3 reads the step from another file than ZeRO-1 and 2, and the steps of all parameters are
    # equal: write any of them twice.
    step = next((key for key, (state, _) in state_of_key.items() if state == STEP), None)
    hidden = dict(catalog.hidden)
    if step is not None:
        hidden[STEP_COPY] = tensors[step]

    notes = _notes(catalog, {state for state, _ in state_of_key.values()})
    rounded = {name: catalog.tensors[name] for name in masters if name in catalog.tensors}
    record = (
        *catalog.dropped,
        *dropped_unlisted(
            rounded, "rounded copies of the master weights, which are written instead"
        ),
    )
    result = replace(catalog, tensors=tensors, hidden=hidden, skeleton=None, dropped=record)
    return result.noted(notes)


def _notes(catalog: Catalog, states: set[str]) -> list[str]:
    """Return notes on missing optimizer state, with the consequences for DeepSpeed.

    Args:
        states: names of the states that are tensors.
    """
    objects = {
        state_key[0]
        for key in catalog.objects
        if (state_key := split_state_path(key, catalog.tensors)) is not None
    }
    if not (states | objects) - {MASTER}:
        return [NO_STATE]
    notes = []
    if STEP not in states | objects:
        notes.append(
            "there is no optimizer step, so ZeRO-3 cannot load the optimizer state (ZeRO-1 and "
            "ZeRO-2 can)"
        )
    if not any(key.startswith(f"{OPTIMIZER}.{PARAM_GROUPS}.") for key in catalog.objects):
        notes.append(
            "there are no param_groups, so a run that loads the checkpoint uses its own "
            "learning rate and other optimizer settings"
        )
    return notes


FORMAT = Format(
    name="deepspeed_universal",
    title="DeepSpeed universal",
    sniff=sniff,
    read=read,
    read_weights=read_weights,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "deepspeed_load"),
    aliases=("ucp",),
    has_objects_beside=True,
    has_named_optimizer=True,
    has_files_above=True,
    adapt=for_universal,
    check=check,
    records_ties=True,
    cut_experts=cut_experts,
    notes_of=_notes_of,
)
