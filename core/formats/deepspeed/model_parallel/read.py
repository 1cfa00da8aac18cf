"""A DeepSpeed checkpoint of several pipeline stages or tensor-parallel ranks.

On disk, beside the files of each model-parallel rank (``model_parallel.grid``)::

    layer_NN-model_states.pt             weights of layer NN of a ``PipelineModule``
    layer_NN-model_TT-model_states.pt    the same of tensor-parallel rank TT

The masters of a stage are in the optimizer files of its ranks, under the names of the
``PipelineModule``: ``NN.<name>``, and ``tied_modules.<key>.<name>`` for layers that stages share.
The files of layers have the 16-bit copies, and what is not trained. Tensors of tensor-parallel
ranks are joined as ``universal_checkpoint_info`` says; without it they are refused.

Versions: 0.6 and later. Not supported, refused by name: ZeRO-0 without optimizer files, experts
with tensor parallelism.

Source: DeepSpeed 0.19.8 ``runtime/pipe/module.py``, ``checkpoint/ds_to_universal.py``; checkpoints
that it wrote and converted, pinned in tests/golden/deepspeed_parallel.tar.xz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.facets import WeightCopies
from core.catalog.key_patterns import some_of
from core.errors import CorruptError, ReplicaMismatchError, UnsupportedError
from core.formats.deepspeed.files import SAVE_AGAIN_HINT, rank_files
from core.formats.deepspeed.model_parallel.grid import grid_of
from core.formats.deepspeed.model_parallel.join import are_equal, joined, with_replicas
from core.formats.deepspeed.model_parallel.rules import INFO, JoinPlan, plan_whole, rules_of
from core.formats.deepspeed.model_parallel.whole import is_whole, read_hidden_size
from core.formats.deepspeed.partitioned import read_data_parallel
from core.formats.deepspeed.runs import UnkeyedTensor, pair_with_copy, tensor_of_array
from core.formats.deepspeed.state_file import read_state_file
from core.pickle.inert import TensorLeaf

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_parallel.grid import StageGrid
    from core.formats.deepspeed.model_parallel.rules import TensorParallelRules
    from core.formats.deepspeed.partitioned import PartitionedStates

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
    by_rank = [_read_rank(store, rank, is_single=len(ranks) == 1) for rank in ranks]
    head = by_rank[0]
    grid = grid_of(head.model, len(ranks), layers)
    rules = rules_of(head.model)
    if grid.tp > 1 and not rules.is_recorded:
        raise UnsupportedError(
            f"there are {grid.tp} tensor-parallel ranks, but the model files have no {INFO}, which "
            "says along which axis each parameter was cut",
            file=head.model.state.file,
            hint="let the training script set model.universal_checkpoint_info and save again (see "
            f"docs/howto/deepspeed.md); or {SAVE_AGAIN_HINT.partition(': ')[2]}",
        )
    # Each stage on its own, then the union: tied parameters are in several stages.
    plans: dict[str, JoinPlan] = {}
    stages = []
    for number in range(grid.pp):
        shards = by_rank[number * grid.tp : (number + 1) * grid.tp]
        stage_plans = _plan_stage(store, shards, rules)
        stages.append(_joined_stage(store, shards, stage_plans) if stage_plans else shards[0])
        plans |= stage_plans
    weights: dict[str, UnkeyedTensor] = {}
    states: dict[str, Mapping[str, object]] = {}
    for stage in stages:
        for name, tensor in stage.weights.items():
            if name in weights and not are_equal(store, [weights[name], tensor], _COMPARED_BYTES):
                raise ReplicaMismatchError(
                    "the parameter differs between pipeline stages",
                    file=stage.model.state.file,
                    key=name,
                    hint="files of different steps were mixed; copy the checkpoint again",
                )
            weights[name] = with_replicas([weights[name], tensor]) if name in weights else tensor
        states = {**stage.states, **states}
    # What only the files of layers contain: frozen parameters and buffers.
    hidden_size = read_hidden_size(head.model)
    untrained = _untrained(store, layers, weights, rules, plans, hidden_size)
    notes = [note for stage in stages for note in stage.notes]
    whole = [name for name, plan in plans.items() if not plan.is_stated]
    if whole:
        notes.append(
            f"no pattern of {INFO} says how parameters such as {some_of(whole)} are cut; every "
            "tensor-parallel rank has them whole, so they are taken once"
        )
    if untrained:
        notes.append(
            "parameters in no optimizer group, read from the files of layers in their precision: "
            + ", ".join(list(untrained)[:3])
        )
    groups, names_of = _groups(stages)
    return replace(
        head,
        weights=weights | untrained,
        aliases={name: owner for stage in stages for name, owner in stage.aliases.items()},
        states=states,
        param_groups=groups,
        names_of=names_of,
        notes=tuple(dict.fromkeys(notes)),
        dropped=tuple(dict.fromkeys(item for stage in stages for item in stage.dropped)),
        extras={name: value for stage in stages for name, value in stage.extras.items()},
        copies=None
        if head.copies is None
        else WeightCopies(lambda: _pair_copies(store, by_rank, layers, grid)),
    )


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


def _read_rank(store: ReadStore, rank: int, *, is_single: bool) -> PartitionedStates:
    """Read the files of a model-parallel rank.

    Raises:
        UnsupportedError: the rank has no optimizer files, or files of experts.
    """
    files = rank_files(store, rank)
    if files.experts and not is_single:
        raise UnsupportedError(
            "files of single experts with several model-parallel ranks are not supported",
            file=files.experts[0],
            hint=SAVE_AGAIN_HINT,
        )
    partitioned = read_data_parallel(store, files)
    if partitioned is None:
        raise UnsupportedError(
            "model-parallel ranks and pipeline stages without ZeRO's optimizer files are not "
            "supported: nothing names the parameters",
            file=f"mp_rank_{rank:02d}_model_states.pt",
            hint=SAVE_AGAIN_HINT,
        )
    return partitioned


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
    hidden_size = read_hidden_size(head.model)
    names = [name for name in head.weights if name not in head.model.buffers]
    # The biases of layers follow their weights.
    for name in sorted(names, key=lambda name: name.endswith(".bias")):
        weights = [shard.weights[name] for shard in shards]
        whole = is_whole(store, name, weights, rules, plans=plans, hidden_size=hidden_size)
        plans[name] = (
            plan_whole(weights[0].shape, is_stated=False)
            if whole
            else rules.plan(name, [shard.shape for shard in weights])
        )
    return {name: plans[name] for name in names}


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
            store, name, [shard.weights[name] for shard in shards], plan, head, is_weight=True
        )
        for state, value in head.states.get(name, {}).items():
            values = [shard.states.get(name, {}).get(state) for shard in shards]
            tensors = [item for item in values if isinstance(item, UnkeyedTensor)]
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
                store, name, tensors, None if is_value else plan, head, is_weight=False
            )
    notes = [note for shard in shards for note in shard.notes]
    if n_padded:
        notes.append(
            "rows beyond original_vocab_size are padding and left out, as in universal checkpoints"
        )
    return replace(
        head,
        weights=weights,
        aliases=head.aliases,
        states=states,
        notes=notes,
        dropped=[item for shard in shards for item in shard.dropped],
        extras={name: value for name, value in extras.items() if name in states},
    )


def _joined_tensor(
    store: ReadStore,
    name: str,
    tensors: Sequence[UnkeyedTensor],
    plan: JoinPlan | None,
    head: PartitionedStates,
    *,
    is_weight: bool,
) -> UnkeyedTensor:
    """Return a tensor, joined from its shards.

    Args:
        plan: how; None for a value that all ranks have.
        head: the first of the ranks.

    Raises:
        ReplicaMismatchError: ranks that should have the same values have others.
    """
    # Moments of what no pattern calls replicated are compared only where they are converted.
    is_checked = plan is None or (plan.is_replicated and (plan.is_stated or is_weight))
    if is_checked and not are_equal(store, tensors, _COMPARED_BYTES):
        raise ReplicaMismatchError(
            "the tensor differs between tensor-parallel ranks, all of which should have the same",
            file=head.model.state.file,
            key=name,
            hint="files of different steps were mixed; copy the checkpoint again",
        )
    if plan is None:
        return with_replicas(tensors)
    if plan.is_replicated:
        return with_replicas(
            [joined([tensor] * len(tensors), plan.shape, plan.pieces) for tensor in tensors]
        )
    return joined(tensors, plan.shape, plan.pieces)


def _untrained(
    store: ReadStore,
    layers: Mapping[int, Mapping[int, str]],
    weights: Mapping[str, UnkeyedTensor],
    rules: TensorParallelRules,
    plans: Mapping[str, JoinPlan],
    hidden_size: int | None,
) -> dict[str, UnkeyedTensor]:
    """Return what the files of layers contain and the optimizer files do not.

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
    for layer, by_rank in sorted(layers.items()):
        files = [read_state_file(store, by_rank[tp_rank]) for tp_rank in range(len(by_rank))]
        for key, value in files[0].root.items():
            if not isinstance(value, TensorLeaf):
                continue
            short = files[0].name(key, "the file")
            shards = [tensor_of_array(file.tensor(file.root.get(key), short)) for file in files]
            name = f"{layer}.{short}"
            shape, tensor = shards[0].shape, shards[0]
            if len(shards) > 1 or rules.is_recorded:
                plan = plans.get(name)
                if plan is None:
                    whole = is_whole(
                        store, name, shards, rules, plans=plans, hidden_size=hidden_size
                    )
                    plan = (
                        plan_whole(shape, is_stated=False)
                        if whole
                        else rules.plan(name, [shard.shape for shard in shards])
                    )
                shape, tensor = plan.shape, joined(shards, plan.shape, plan.pieces)
            if name in weights:
                if weights[name].shape != shape:
                    raise files[0].corrupt(
                        f"the weights have shape {shape}, but their masters {weights[name].shape}",
                        key=name,
                    )
            elif not any(short == other for other, _ in tied):
                # A tied layer's file has no name that tells it from others.
                untrained[name] = tensor
    return untrained


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
