"""A DeepSpeed checkpoint of several pipeline stages or tensor-parallel ranks.

On disk, beside the files of each model-parallel rank (``model_states``)::

    layer_NN-model_states.pt             weights of layer NN of a ``PipelineModule``
    layer_NN-model_TT-model_states.pt    the same of tensor-parallel rank TT

The masters of a stage are in the optimizer files of its ranks, under the names of the
``PipelineModule``: ``NN.<name>``, and ``tied_modules.<key>.<name>`` for layers that stages share.
The files of layers have the 16-bit copies, and what is not trained. Tensors of tensor-parallel
ranks are joined as ``universal_checkpoint_info`` says; without it they are refused.

Without ZeRO, BF16_Optimizer writes such masters too, and other optimizers a state dict into each
model file; the weights are then those in the files of layers.

Versions: 0.6 and later. Not supported, refused by name: experts with tensor parallelism.

Source: DeepSpeed 0.19.8 ``runtime/pipe/module.py``, ``checkpoint/ds_to_universal.py``; checkpoints
that it wrote and converted, pinned in tests/golden/deepspeed_parallel.tar.xz.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from core.engine.catalog.dropped import dropped_each
from core.engine.catalog.facets import WeightCopies
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.tensor import Tensor, find_ties, whole_tensor
from core.errors import CorruptError, MissingShardError, ReplicaMismatchError, UnsupportedError
from core.formats.deepspeed.experts import with_experts
from core.formats.deepspeed.files import (
    SAVE_AGAIN,
    SAVE_AGAIN_HINT,
    list_expert_files,
    list_rank_files,
)
from core.formats.deepspeed.model_parallel.join import begin_alike, join_shards
from core.formats.deepspeed.model_parallel.rules import (
    INFO,
    JoinPlan,
    is_whole,
    plan_whole,
    read_hidden_size,
    rules_of,
)
from core.formats.deepspeed.model_states import (
    NO_TENSOR,
    ZeroFacts,
    grid_of,
    parse_model_states,
    record_other_files,
)
from core.formats.deepspeed.partitioned import PartitionedStates, read_data_parallel
from core.formats.deepspeed.runs import pair_with_copy
from core.formats.deepspeed.state_file import MIXED_STEPS_HINT, read_state_file
from core.formats.deepspeed.tree import OPTIMIZER, PARAM_GROUPS, PARAMS, spread
from core.formats.deepspeed.weights import with_shared
from core.pickle.fields import int_or_none, list_or_empty, mapping_or_empty
from core.pickle.inert import TensorLeaf

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_parallel.rules import TensorParallelRules
    from core.formats.deepspeed.model_states import ModelStates, StageGrid
    from core.formats.deepspeed.partition import Shapes

_COMPARED_BYTES = 1 << 16


def read_model_parallel(
    store: ReadStore, ranks: Sequence[int], layers: Mapping[int, Mapping[int, str]]
) -> PartitionedStates:
    """Return the weights, states and settings of all model-parallel ranks.

    Args:
        ranks: the ranks that have files.
        layers: number of a layer → tensor-parallel rank → its file.

    Raises:
        UnsupportedError: nothing says how the shards are joined, or a kind is not supported.
        MissingShardError, CorruptError, ReplicaMismatchError: files are missing or contradict each
            other.
    """
    if not any(list_rank_files(store, rank).optim for rank in ranks):
        return read_model_files(store, ranks, layers)
    shapes_in = cache(partial(_read_shapes, store))
    by_rank = []
    for rank in ranks:
        layer_shapes = partial(_collect_shapes, layers, rank, shapes_in)
        by_rank.append(_read_rank(store, rank, layer_shapes, is_single=len(ranks) == 1))
    head = by_rank[0]
    grid = grid_of(head.model, len(ranks), layers)
    rules = _get_rules(head.model, grid)
    # Each stage on its own, then the union: tied parameters are in several stages.
    plans: dict[str, JoinPlan] = {}
    stages = []
    for number in range(grid.pp):
        shards = by_rank[number * grid.tp : (number + 1) * grid.tp]
        stage_plans = _plan_stage(store, shards, rules)
        stages.append(_joined_stage(store, shards, stage_plans) if stage_plans else shards[0])
        plans |= stage_plans
    weights: dict[str, Tensor] = {}
    states: dict[str, Mapping[str, object]] = {}
    for stage in stages:
        for name, tensor in stage.weights.items():
            if name in weights and not begin_alike(store, [weights[name], tensor], _COMPARED_BYTES):
                raise ReplicaMismatchError(
                    "the parameter differs between pipeline stages",
                    file=stage.model.state.file,
                    key=name,
                    hint=MIXED_STEPS_HINT,
                )
            weights[name] = weights[name].with_replicas(tensor) if name in weights else tensor
        states = {**stage.states, **states}
    ties = {name: owner for stage in stages for name, owner in find_ties(stage.weights).items()}
    for name, owner in ties.items():
        if weights[name] is not weights[owner]:
            weights[owner] = weights[owner].with_replicas(weights[name])
    weights |= {name: weights[owner] for name, owner in ties.items()}
    # What only the files of layers contain: frozen parameters and buffers.
    untrained, plans, others = _untrained(store, layers, weights, rules, plans, head.model)
    notes = [note for stage in stages for note in stage.notes]
    notes += _note_whole(plans)
    if untrained:
        notes.append(
            "parameters in no optimizer group were read from the layer files in their own "
            "precision: " + ", ".join(list(untrained)[:3])
        )
    groups, names_of = _groups(stages)
    return replace(
        head,
        weights=weights | untrained,
        states=states,
        param_groups=groups,
        names_of=names_of,
        notes=tuple(dict.fromkeys(notes)),
        dropped=(
            *dict.fromkeys(item for stage in stages for item in stage.dropped),
            *record_other_files([rank.model for rank in by_rank]),
            *dropped_each(others, NO_TENSOR),
        ),
        extras={name: value for stage in stages for name, value in stage.extras.items()},
        copies=None
        if head.copies is None
        else WeightCopies(lambda: _pair_copies(store, by_rank, layers, grid)),
    )


def _note_whole(plans: Mapping[str, JoinPlan]) -> list[str]:
    """Return a note on parameters that are taken once though no pattern says so."""
    whole = [name for name, plan in plans.items() if not plan.is_stated]
    if not whole:
        return []
    return [
        (
            f"no pattern in {INFO} says how parameters such as {some_of(whole)} are split; every "
            "tensor-parallel rank has a full copy, so one copy is used"
        )
    ]


def _pair_copies(
    store: ReadStore,
    by_rank: Sequence[PartitionedStates],
    layers: Mapping[int, Mapping[int, str]],
    grid: StageGrid,
) -> list[tuple[str, StoredArray, StoredArray]]:
    """Return the pieces of all ranks' master weights with the copies in model and layer files."""
    pairs = [pair for rank in by_rank if rank.copies is not None for pair in rank.copies.pairs()]
    for layer, files in layers.items():
        for tp_rank, file in files.items():
            state = read_state_file(store, file)
            for short, value in state.root.items():
                if not isinstance(value, TensorLeaf):
                    continue
                name, copy = f"{layer}.{short}", state.arrays[value.key]
                # Every stage is asked: which layers it has is recorded nowhere.
                for rank in by_rank[tp_rank :: grid.tp]:
                    pairs += pair_with_copy(name, rank.masters_of(name), copy)
    return pairs


def read_model_files(
    store: ReadStore,
    ranks: Sequence[int],
    layers: Mapping[int, Mapping[int, str]],
    *,
    keeps_optimizer: bool = True,
) -> PartitionedStates:
    """Return the weights in the files of the model and of layers, in their own precision.

    Args:
        ranks, layers: as for ``read_model_parallel``.
        keeps_optimizer: return the optimizer's state dicts, which the model files have without
            ZeRO.

    Raises:
        MissingShardError: the optimizer files, which ZeRO writes, are missing; or a file of a
            layer is.
        UnsupportedError, CorruptError, ReplicaMismatchError: as for ``read_model_parallel``.
    """
    models = []
    for rank in ranks:
        name = f"mp_rank_{rank:02d}_model_states.pt"
        if not store.exists(name):
            raise MissingShardError("the model file is missing", file=name)
        models.append(parse_model_states(read_state_file(store, name)))
    head = models[0]
    # Only ZeRO records the shapes of what it partitions.
    if keeps_optimizer and head.groups is not None:
        raise MissingShardError(
            "the optimizer files, which contain the fp32 weights, are missing",
            file="*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )
    grid = grid_of(head, len(ranks), layers)
    rules = _get_rules(head, grid)
    if layers:
        weights, plans, others = _untrained(store, layers, {}, rules, {}, head)
    else:
        others = []
        experts = [read_state_file(store, name) for name in list_expert_files(store.files())]
        if experts and len(ranks) > 1:
            raise _refuse_experts(experts[0].file)
        models[0] = with_experts(head, experts)
        weights, plans = _join_modules(store, models, rules)
    optimizers = [model.state.root.get(OPTIMIZER) for model in models]
    _check_complete(models, optimizers, weights, grid)
    trees = [spread(value, model.state) for model, value in zip(models, optimizers, strict=True)]
    has_optimizer = keeps_optimizer and any(value is not None for value in optimizers)
    weights = with_shared(models[0], weights)
    return PartitionedStates(
        model=head,
        state=head.state,
        facts=ZeroFacts(0, int_or_none(head.state.root.get("dp_world_size")) or 1),
        weights=weights,
        states={},
        param_groups=[],
        names_of={},
        other_entries={},
        notes=_note_whole(plans),
        dropped=[
            *dict.fromkeys(entry for model in models for entry in model.dropped),
            *record_other_files(models),
            *dropped_each(others, NO_TENSOR),
        ],
        optimizers=trees if has_optimizer else [],
        files=[model.state for model in models[1:]],
    )


def _join_modules(
    store: ReadStore, models: Sequence[ModelStates], rules: TensorParallelRules
) -> tuple[dict[str, Tensor], dict[str, JoinPlan]]:
    """Return the weights in the model files of tensor-parallel ranks, joined, and their plans.

    Raises:
        CorruptError: the ranks have different parameters, or shapes that do not fit.
        ReplicaMismatchError: ranks that should have the same values have others.
    """
    head = models[0]
    weights: dict[str, Tensor] = {}
    plans: dict[str, JoinPlan] = {}
    hidden_size = read_hidden_size(head, store)
    for name in sorted(head.module, key=lambda name: name.endswith(".bias")):
        shards = []
        for model in models:
            if name not in model.module:
                raise model.state.mismatch(
                    "the parameter is missing from this rank, but other ranks have it", key=name
                )
            shards.append(whole_tensor(model.module[name]))
        if len(models) == 1:
            weights[name] = shards[0]
            continue
        if name not in head.buffers:
            plans[name] = _plan_parameter(store, name, shards, rules, plans, hidden_size)
        weights[name] = _joined_tensor(store, name, shards, plans.get(name), head, is_weight=True)
    return {name: weights[name] for name in head.module}, plans


def _check_complete(
    models: Sequence[ModelStates],
    optimizers: Sequence[object],
    weights: Mapping[str, Tensor],
    grid: StageGrid,
) -> None:
    """Raise if the model's files lack a parameter that ZeRO names, or that an optimizer counts.

    Args:
        models, optimizers: the model files and their optimizer's state dicts, by rank.
        weights: what the model's files contain.

    Raises:
        MissingShardError: a file of a layer must be missing.
    """
    hint = "copy the checkpoint again, with all its files"
    for model in models:
        for name in (name for group in model.groups or () for name in group):
            if name not in weights and not name.startswith("tied_modules."):
                raise MissingShardError(
                    "param_shapes lists the parameter, but no layer file contains it",
                    file=model.state.file,
                    key=name,
                    hint=hint,
                )
    n_trained, n_tensors = 0, grid.tp * len(weights)
    for optimizer in optimizers:
        for group in list_or_empty(mapping_or_empty(optimizer).get(PARAM_GROUPS)):
            n_trained += len(list_or_empty(mapping_or_empty(group).get(PARAMS)))
    if n_trained > n_tensors:
        raise MissingShardError(
            f"the optimizers have {n_trained} parameters, but the layer files have "
            f"{n_tensors} tensors",
            file="layer_*-model_states.pt",
            hint=hint,
        )


def _get_rules(model: ModelStates, grid: StageGrid) -> TensorParallelRules:
    """Return what a model file says about tensor parallelism.

    Raises:
        UnsupportedError: it says nothing, but there are several tensor-parallel ranks.
    """
    rules = rules_of(model)
    if grid.tp > 1 and not rules.is_recorded:
        raise UnsupportedError(
            f"there are {grid.tp} tensor-parallel ranks, but the model files have no {INFO}, which "
            "says along which axis each parameter was split",
            file=model.state.file,
            hint="set model.universal_checkpoint_info in the training script, and save the "
            "checkpoint again (see "
            f"docs/howto/deepspeed.md); or {SAVE_AGAIN}",
        )
    return rules


def _read_rank(
    store: ReadStore, rank: int, layer_shapes: Callable[[], Shapes], *, is_single: bool
) -> PartitionedStates:
    """Read the files of a model-parallel rank.

    Args:
        layer_shapes: as for ``read_data_parallel``.

    Raises:
        MissingShardError: the rank has no optimizer files.
        UnsupportedError: the rank has files of experts.
    """
    files = list_rank_files(store, rank)
    if files.experts and not is_single:
        raise _refuse_experts(files.experts[0])
    partitioned = read_data_parallel(store, files, layer_shapes)
    if partitioned is None:
        raise MissingShardError(
            f"the optimizer files of model-parallel rank {rank} are missing, although other "
            "ranks have theirs",
            file=f"*zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )
    return partitioned


def _collect_shapes(
    layers: Mapping[int, Mapping[int, str]], rank: int, shapes_in: Callable[[str], Shapes]
) -> Shapes:
    """Return name → shape of what the files of layers contain for a model-parallel rank.

    Args:
        shapes_in: returns the same of one file, without the layer's number.
    """
    return {
        f"{layer}.{short}": shape
        for layer, by_rank in layers.items()
        for short, shape in shapes_in(by_rank[sorted(by_rank)[rank % len(by_rank)]]).items()
    }


def _read_shapes(store: ReadStore, file: str) -> Shapes:
    """Return name → shape of the tensors in the file of a layer."""
    state = read_state_file(store, file)
    return {
        str(name): state.arrays[value.key].shape
        for name, value in state.root.items()
        if isinstance(value, TensorLeaf)
    }


def _refuse_experts(file: str) -> UnsupportedError:
    """Return the error about experts with tensor parallelism."""
    return UnsupportedError(
        "per-expert files from several model-parallel ranks are not supported",
        file=file,
        hint=SAVE_AGAIN_HINT,
    )


def _plan_stage(
    store: ReadStore, shards: Sequence[PartitionedStates], rules: TensorParallelRules
) -> dict[str, JoinPlan]:
    """Return how each parameter of a stage is joined; {} if there is nothing to join.

    Raises:
        CorruptError: the ranks have different parameters, or shapes that do not fit.
    """
    if len(shards) == 1 and not rules.is_recorded:
        return {}
    head = shards[0]
    for shard in shards[1:]:
        for name in {*head.weights} ^ {*shard.weights}:
            raise CorruptError(
                "only some of the tensor-parallel ranks have the parameter",
                file=shard.model.state.file,
                key=name,
            )
    plans: dict[str, JoinPlan] = {}
    hidden_size = read_hidden_size(head.model, store)
    names = [name for name in head.weights if name not in head.model.buffers]
    # The biases of layers follow their weights.
    for name in sorted(names, key=lambda name: name.endswith(".bias")):
        weights = [shard.weights[name] for shard in shards]
        plans[name] = _plan_parameter(store, name, weights, rules, plans, hidden_size)
    return {name: plans[name] for name in names}


def _plan_parameter(
    store: ReadStore,
    name: str,
    shards: Sequence[Tensor],
    rules: TensorParallelRules,
    plans: Mapping[str, JoinPlan],
    hidden_size: int | None,
) -> JoinPlan:
    """Return how a parameter is joined.

    Args:
        plans: how the weights of layers are joined, which decide on the biases.

    Raises:
        UnsupportedError, CorruptError: as for ``TensorParallelRules.plan``.
    """
    if is_whole(store, name, shards, rules, plans=plans, hidden_size=hidden_size):
        return plan_whole(shards[0].shape, is_stated=False)
    return rules.plan(name, [shard.shape for shard in shards])


def _joined_stage(
    store: ReadStore, shards: Sequence[PartitionedStates], plans: Mapping[str, JoinPlan]
) -> PartitionedStates:
    """Return a pipeline stage, joined from its tensor-parallel ranks.

    Args:
        plans: how its parameters are joined.

    Raises:
        CorruptError: the ranks have different states.
        ReplicaMismatchError: ranks that should have the same values have others.
    """
    head = shards[0]
    weights, extras, n_padded = {}, {}, 0
    states: dict[str, dict[str, object]] = {}
    for name in head.weights:
        plan = plans.get(name)
        if plan is not None:
            n_padded += bool(plan.n_padding)
            extras[name] = plan.extras
        weights[name] = _joined_tensor(
            store, name, [shard.weights[name] for shard in shards], plan, head.model, is_weight=True
        )
        for state, value in head.states.get(name, {}).items():
            values = [shard.states.get(name, {}).get(state) for shard in shards]
            tensors = [item for item in values if isinstance(item, Tensor)]
            if not tensors:
                states.setdefault(name, {})[state] = value
                continue
            if len(tensors) < len(values):
                raise CorruptError(
                    f"only some of the tensor-parallel ranks have the state {state!r}",
                    file=head.state.file,
                    key=name,
                )
            # A step is one value, which all ranks have.
            is_value = tensors[0].shape != head.weights[name].shape
            states.setdefault(name, {})[state] = _joined_tensor(
                store, name, tensors, None if is_value else plan, head.model, is_weight=False
            )
    weights |= {name: weights[owner] for name, owner in find_ties(head.weights).items()}
    notes = [note for shard in shards for note in shard.notes]
    if n_padded:
        notes.append(
            "rows beyond original_vocab_size are padding and were left out, as in universal "
            "checkpoints"
        )
    return replace(
        head,
        weights=weights,
        states=states,
        notes=notes,
        dropped=[item for shard in shards for item in shard.dropped],
        extras={name: value for name, value in extras.items() if name in states},
    )


def _joined_tensor(
    store: ReadStore,
    name: str,
    tensors: Sequence[Tensor],
    plan: JoinPlan | None,
    model: ModelStates,
    *,
    is_weight: bool,
) -> Tensor:
    """Return a tensor, joined from its shards.

    Args:
        plan: how; None for a value that all ranks have.
        model: the model file of the first rank.

    Raises:
        ReplicaMismatchError: ranks that should have the same values have others.
    """
    # Moments of what no pattern calls replicated are compared only where they are converted.
    is_checked = plan is None or (plan.is_replicated and (plan.is_stated or is_weight))
    if is_checked and not begin_alike(store, tensors, _COMPARED_BYTES):
        raise ReplicaMismatchError(
            "the tensor differs between tensor-parallel ranks, which should all have the same "
            "values",
            file=model.state.file,
            key=name,
            hint=MIXED_STEPS_HINT,
        )
    if plan is None:
        return tensors[0].with_replicas(*tensors[1:])
    if plan.is_replicated:
        whole = [
            join_shards([tensor] * len(tensors), plan.shape, plan.pieces) for tensor in tensors
        ]
        return whole[0].with_replicas(*whole[1:])
    return join_shards(tensors, plan.shape, plan.pieces)


def _untrained(
    store: ReadStore,
    layers: Mapping[int, Mapping[int, str]],
    weights: Mapping[str, Tensor],
    rules: TensorParallelRules,
    plans: Mapping[str, JoinPlan],
    model: ModelStates,
) -> tuple[dict[str, Tensor], dict[str, JoinPlan], list[str]]:
    """Return what the files of layers contain and the optimizer files do not, and its plans.

    The last value are the names of entries that are no tensors.

    Args:
        plans: how the parameters in the optimizer files are joined.
        model: the model file of the first rank.

    Raises:
        CorruptError: a layer has another shape than its masters, or other parameters on other
            tensor-parallel ranks.
    """
    tied = {
        (name.split(".", 2)[-1], tensor.shape)
        for name, tensor in weights.items()
        if name.startswith("tied_modules.")
    }
    untrained = {}
    others: list[str] = []
    plans = dict(plans)
    hidden_size = read_hidden_size(model, store)
    for layer, by_rank in sorted(layers.items()):
        files = [read_state_file(store, by_rank[tp_rank]) for tp_rank in range(len(by_rank))]
        # The biases of layers follow their weights.
        entries = sorted(files[0].root.items(), key=lambda item: str(item[0]).endswith(".bias"))
        for key, value in entries:
            if not isinstance(value, TensorLeaf):
                others.append(f"{layer}.{key}")
                continue
            short = files[0].name(key, "the file")
            shards = [whole_tensor(file.tensor(file.root.get(key), short)) for file in files]
            name = f"{layer}.{short}"
            shape, plan = shards[0].shape, plans.get(name)
            if len(shards) > 1 or rules.is_recorded:
                if plan is None:
                    plan = _plan_parameter(store, name, shards, rules, plans, hidden_size)
                    plans[name] = plan
                shape = plan.shape
            if name in weights:
                if weights[name].shape != shape:
                    raise files[0].mismatch(
                        f"the weights have shape {shape}, but their master weights "
                        f"have shape {weights[name].shape}",
                        key=name,
                    )
            elif not any(short == other for other, _ in tied):
                # A tied layer's file has no name that tells it from others.
                untrained[name] = (
                    shards[0]
                    if plan is None
                    else _joined_tensor(store, name, shards, plan, model, is_weight=True)
                )
    return untrained, plans, others


def _groups(
    stages: Sequence[PartitionedStates],
) -> tuple[Sequence[Mapping[object, object]], dict[int, list[str]]]:
    """Return the settings of the optimizer's groups, and number → names of its parameters.

    Groups of the same number and settings in all stages are one group; otherwise each stage keeps
    its own.
    """
    if any(not stage.names_of for stage in stages):
        return stages[0].param_groups, {}
    plain = [
        [{k: v for k, v in group.items() if k != "params"} for group in stage.param_groups]
        for stage in stages
    ]
    if all(groups == plain[0] for groups in plain):
        names: dict[int, list[str]] = {}
        for stage in stages:
            for number, members in stage.names_of.items():
                names.setdefault(number, []).extend(
                    name for name in members if name not in names.get(number, ())
                )
        return stages[0].param_groups, names
    groups: list[Mapping[object, object]] = []
    names = {}
    for stage in stages:
        first = len(names)
        for number, members in stage.names_of.items():
            names[first + number] = list(members)
        for group in stage.param_groups:
            numbers = group.get("params")
            if isinstance(numbers, (list, tuple)):
                group = {**group, "params": [first + n for n in numbers if type(n) is int]}
            groups.append(group)
    return groups, names
