"""What the files of all data-parallel ranks of ZeRO-1, 2 or 3 contain together, by parameter.

The optimizer's state is taken from the flat groups of all ranks. The optimizer that ZeRO wraps has
one flat parameter per group. So each of its states is either flat too (``exp_avg``) or one value
for the group (``step``), which then belongs to each parameter.

Not supported, dropped by name: states of 8 bits of bitsandbytes, which quantizes each rank's part
of a flat group in blocks that reach across parameters; states of other lengths; mappings of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING

from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import WeightCopies
from core.engine.catalog.flat_runs import FlatRun
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import whole_tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    list_some,
    placing_errors,
)
from core.formats.deepspeed.experts import cut_with_experts, local_names, with_experts
from core.formats.deepspeed.files import missing_rank
from core.formats.deepspeed.model_states import ZeroFacts, parse_model_states, record_other_files
from core.formats.deepspeed.optim_states import parse_optim_states
from core.formats.deepspeed.partition import CutGroups, cut_groups, cut_parameters
from core.formats.deepspeed.runs import list_runs_in_groups, pair_with_copy, tensor_in_groups
from core.formats.deepspeed.state_file import MIXED_STEPS_HINT, read_state_file
from core.formats.deepspeed.tree import WholeObject
from core.formats.deepspeed.weights import buffers, frozen, unlisted_weights, with_shared
from core.megatron.optimizer.proof import are_masters
from core.pickle.inert import TensorLeaf, walk
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.stored import StoredArray
    from core.engine.catalog.tensor import Tensor
    from core.files.store import ReadStore
    from core.formats.deepspeed.files import ZeroRankFiles
    from core.formats.deepspeed.model_states import ModelStates
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import CutParameters, Partition, Shapes
    from core.formats.deepspeed.state_file import StateFile


@dataclass(frozen=True, slots=True)
class PartitionedStates:
    """Weights, states and settings that data-parallel ranks share.

    Args:
        model: the model file; in ZeRO-3 that of rank 0.
        state: the optimizer file of rank 0.
        facts: stage and number of ranks.
        weights: weights by name.
        states: parameter → state name → ``Tensor`` or ``WholeObject``.
        param_groups: the settings of the optimizer's groups, as stored.
        names_of: number of a flat group → names of its parameters; {} if unknown.
        other_entries: all other entries of the optimizer's state.
        notes: messages for the user.
        dropped: what is not stored or cannot be read, with the reason.
        extras: parameter → how tensor parallelism cut it, as a universal checkpoint records it.
        copies: the model's weights in its own precision, beside their masters; None in ZeRO-3.
        masters_of: returns where the master weights of a trained parameter are stored.
        optimizers: the optimizer's state dicts as trees, by model-parallel rank, where no masters
            are stored (``core.formats.deepspeed.tree.spread``).
        files: further files that contain tensors of ``optimizers``.
    """

    model: ModelStates
    state: StateFile
    facts: ZeroFacts
    weights: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, object]]
    param_groups: Sequence[Mapping[object, object]]
    names_of: Mapping[int, Sequence[str]]
    other_entries: Mapping[str, object]
    notes: Sequence[str]
    dropped: Sequence[Dropped]
    extras: Mapping[str, object] = field(default_factory=dict)
    copies: WeightCopies | None = None
    masters_of: Callable[[str], list[FlatRun]] = lambda name: []
    optimizers: Sequence[object] = ()
    files: Sequence[StateFile] = ()


def read_data_parallel(
    store: ReadStore, files: ZeroRankFiles, layer_shapes: Callable[[], Shapes] = dict
) -> PartitionedStates | None:
    """Return what the files of a model-parallel rank contain; None without optimizer files.

    Args:
        layer_shapes: returns name → shape of what a pipeline's files of layers contain; called
            only if the model file does not record the shapes.

    Raises:
        MissingShardError: a rank's file is missing.
        CorruptError: a file is malformed, or files contradict each other.
        ReplicaMismatchError: a scalar of the optimizer differs between ranks.
    """
    store.expect_headers(files.names)
    optim = [parse_optim_states(read_state_file(store, name)) for name in files.optim]
    if not optim:
        return None
    check_ranks(optim, files)
    # ZeRO-3 has a model file per rank, with the rank's parts of frozen parameters.
    if optim[0].stage == 3:
        if len(files.zero_model) < len(optim):
            like = files.optim[0].partition("zero_pp")
            name = f"{like[1]}{like[2]}".replace("optim_states", "model_states")
            raise missing_rank(name, len(files.zero_model))
        models = [parse_model_states(read_state_file(store, name)) for name in files.zero_model]
        return read_partitioned(store, models, optim)
    if files.model is None:
        raise MissingShardError(
            f"the ZeRO-{optim[0].stage} model file is missing",
            file="mp_rank_00_model_states.pt",
            hint="copy the checkpoint again, with all its files",
        )
    model = parse_model_states(read_state_file(store, files.model))
    experts = [read_state_file(store, name) for name in files.experts]
    model = with_experts(model, experts)
    if model.groups is None and all(rank_optim.slices is not None for rank_optim in optim):
        shapes = {name: array.shape for name, array in model.module.items()}
        shapes.update(layer_shapes())
        model = replace(model, groups=_list_groups(optim, shapes))
    return read_partitioned(store, [model], optim)


def _list_groups(optim: Sequence[OptimStates], shapes: Shapes) -> list[Shapes]:
    """Return the parameters of each group in the order of their recorded positions.

    ``BF16_Optimizer`` partitions the masters without ZeRO too (stage 0), but only ZeRO records
    ``param_shapes``.

    Args:
        shapes: name → shape in the files of the model.

    Raises:
        CorruptError: the model's files lack a parameter, or have another number of elements.
    """
    groups: list[Shapes] = []
    for number in range(len(optim[0].fp32)):
        sizes: dict[str, int] = {}
        for rank_optim in optim:
            recorded = (rank_optim.slices or ())[number]
            for name, (_, n) in sorted(recorded.items(), key=lambda item: item[1]):
                sizes[name] = sizes.get(name, 0) + n
        group = {}
        for name, n in sizes.items():
            candidates = {shapes[name]} if name in shapes else set()
            if name.startswith("tied_modules."):  # the file of a layer has its own names
                short = name.split(".", 2)[-1]
                candidates = {
                    shape
                    for other, shape in shapes.items()
                    if other.partition(".")[2] == short and prod(shape) == n
                }
            if len(candidates) != 1 or prod(*candidates) != n:
                raise optim[0].state.mismatch(
                    f"param_slice_mappings records {n} elements of the parameter, but "
                    + (
                        f"its shape in the model files is {next(iter(candidates))}"
                        if len(candidates) == 1
                        else "no single shape in the model files has this size"
                    ),
                    key=name,
                )
            group[name] = candidates.pop()
        groups.append(group)
    return groups


def read_partitioned(
    store: ReadStore, models: Sequence[ModelStates], optim: Sequence[OptimStates]
) -> PartitionedStates:
    """Return what the files of all data-parallel ranks of ZeRO-1, 2 or 3 contain.

    Args:
        models: the model files: one, or in ZeRO-3 one per rank.
        optim: the optimizer files by rank.

    Raises:
        CorruptError: files contradict each other.
        ReplicaMismatchError: a scalar of the optimizer differs between ranks.
    """
    head, model = optim[0], models[0]
    if model.groups is None:
        raise model.state.corrupt(f"param_shapes, which ZeRO-{head.stage} needs, is missing")
    for other in models[1:]:
        if other.groups != model.groups or other.frozen != model.frozen:
            raise other.state.mismatch(f"param_shapes differs from that of {model.state.file}")
    partition = _partition(store, model, optim)

    # The weights: master weights in the flat groups, and those that only model files contain. An
    # entry that comes later takes precedence.
    shapes = partition.shapes
    weights = buffers(model) | frozen(models, head.stage)
    flat = [rank_optim.fp32 for rank_optim in optim]
    weights |= {
        name: tensor_in_groups(partition, name, shape, flat) for name, shape in shapes.items()
    }

    def runs(name: str) -> list[FlatRun]:
        return list_runs_in_groups(partition, name, flat) if name in shapes else []

    unlisted, unlisted_notes, lost = unlisted_weights(model, weights, head.stage)
    weights = with_shared(model, weights | unlisted)

    # The optimizer's states and settings by parameter. ZeRO-3 may divide a group into several flat
    # groups; the numbers in the settings are then kept, as they are no groups of parameters.
    states, undivided = states_by_parameter(store, partition, shapes, optim)
    names_of = {number: list(group) for number, group in enumerate(model.groups)}
    if isinstance(partition, CutGroups):
        names_of = {group.number: [] for group in partition.groups}
        for group in partition.groups:
            names_of[group.number] += group.shapes
    return PartitionedStates(
        model=model,
        state=head.state,
        facts=ZeroFacts(head.stage, len(optim)),
        weights=weights,
        states=states,
        param_groups=head.param_groups,
        names_of=names_of if len(model.groups) == len(head.fp32) else {},
        other_entries=head.other_entries,
        notes=[*_frozen_notes(model, weights), *unlisted_notes],
        dropped=[
            *lost,
            *undivided,
            *dict.fromkeys(entry for model in models for entry in model.dropped),
            *record_other_files(models),
        ],
        copies=None if head.stage == 3 else WeightCopies(lambda: pair_copies(model, shapes, runs)),
        masters_of=runs,
    )


def _frozen_notes(model: ModelStates, weights: Mapping[str, Tensor]) -> list[str]:
    """Return a note on frozen parameters, which have no master weights in float32."""
    narrow = [name for name in model.frozen if weights[name].dtype in ("bfloat16", "float16")]
    if not narrow:
        return []
    dtype = weights[narrow[0]].dtype
    note = (
        f"frozen parameters have no float32 master weights and stay {dtype}: {some_of(narrow)} "
        "(--dtype fp32 makes all weights float32)"
    )
    return [note]


def pair_copies(
    model: ModelStates, names: Iterable[str], masters_of: Callable[[str], list[FlatRun]]
) -> list[tuple[str, StoredArray, StoredArray]]:
    """Return the pieces of the master weights with their copies in the model file."""
    return [
        pair
        for name in names
        if name in model.module
        for pair in pair_with_copy(name, masters_of(name), model.module[name])
    ]


def _partition(
    store: ReadStore, model: ModelStates, optim: Sequence[OptimStates]
) -> CutGroups | CutParameters:
    """Return the positions of the parameters in the flat groups, checked against the files.

    Raises:
        CorruptError: shapes, sizes and recorded positions contradict each other.
    """
    assert model.groups is not None
    with placing_errors(file=model.state.file):  # the partition knows no files
        if optim[0].stage == 3:
            sizes = [[array.shape[0] for array in rank_optim.fp32] for rank_optim in optim]
            return cut_parameters(model.groups, sizes)
        if len(model.groups) != len(optim[0].fp32):
            raise model.state.mismatch(
                f"param_shapes has {len(model.groups)} groups, but the optimizer files have "
                f"{len(optim[0].fp32)} groups"
            )
        partition = cut_with_experts(store, model, optim)
        try:
            _check_slices(partition, optim)
        except CorruptError:
            if not _prove_order(store, partition, model, optim):
                raise
    return partition


def _prove_order(
    store: ReadStore, partition: CutGroups, model: ModelStates, optim: Sequence[OptimStates]
) -> bool:
    """Return whether the values prove a partition that the recorded positions contradict.

    With ``round_robin_gradients``, ``param_shapes`` are in the order of the flat groups, but
    ``param_slice_mappings`` have the positions of the optimizer's order (0.19.8,
    ``runtime/zero/stage_1_and_2.py``: ``link_hp_params`` gets ``bit16_groups`` without offsets).
    The copies in the model file are the rounded master weights in one of both orders only.
    """
    groups = []
    for group in partition.groups:
        slices = [(rank_optim.slices or ())[group.number] for rank_optim in optim]
        order = dict.fromkeys(name for rank_slices in slices for name in rank_slices)
        if set(order) != set(group.shapes) or group.stored_names:
            return False
        groups.append(replace(group, shapes={name: group.shapes[name] for name in order}))
    flat = [rank_optim.fp32 for rank_optim in optim]
    sizes = [[array.shape[0] for array in rank_optim.fp32] for rank_optim in optim]

    def has_values(order: CutGroups) -> bool:
        pairs = pair_copies(
            model, order.shapes, lambda name: list_runs_in_groups(order, name, flat)
        )
        return are_masters(store, [(masters, copy) for _, masters, copy in pairs])

    try:
        recorded = cut_groups(groups, sizes, alignment=None)
        _check_slices(recorded, optim)
        return (
            all(name in model.module for name in partition.shapes)
            and has_values(partition)
            and not has_values(recorded)
        )
    except CheckpointingException:  # another contradiction, a dtype without rounding, or damage
        return False


def _check_slices(cut: CutGroups, optim: Sequence[OptimStates]) -> None:
    """Check that the positions recorded in every file agree with those of a partition.

    Raises:
        CorruptError: names the first parameter that is recorded at another position, or not at all.
    """
    if any(rank_optim.slices is None for rank_optim in optim):
        return
    # The files have the numbers that experts have on their ranks.
    local = local_names(cut)
    expected = {
        (run.rank, run.group, local.get(name, name)): (run.at, run.n)
        for name in cut.first
        for run in cut.runs(name)
    }
    for rank, rank_optim in enumerate(optim):
        for group, slices in enumerate(rank_optim.slices or ()):
            for name, recorded in slices.items():
                position = expected.pop((rank, group, name), None)
                # A parameter without elements has no run, but may be recorded.
                if recorded != position and not (position is None and recorded[1] == 0):
                    raise rank_optim.state.mismatch(
                        f"param_slice_mappings records (start, elements) {recorded}, but "
                        "according to the "
                        "shapes of the preceding parameters, this rank has "
                        f"{'no part of it' if position is None else position}; the file may be "
                        "from a different rank",
                        key=name,
                    )
    # Positions that no file records are left over.
    for rank, group, name in expected:
        raise optim[rank].state.mismatch(
            "param_slice_mappings does not list the parameter, which is in this rank's part of "
            f"group {group}",
            key=name,
        )


def check_ranks(optim: Sequence[OptimStates], files: ZeroRankFiles) -> None:
    """Check that the optimizer files are complete and come from one run.

    Raises:
        MissingShardError: the file of a rank is missing.
        CorruptError: the number of ranks, the stage or the number of groups differs between files.
    """
    # Names cannot show that the files of the highest ranks are missing, but every file records the
    # number of ranks.
    n_ranks = max(rank_optim.n_ranks for rank_optim in optim)
    if len(optim) < n_ranks:
        raise missing_rank(files.optim[0], len(optim))
    # Files that an older run left behind show up as other numbers of ranks, stages or groups.
    head = optim[0]
    for rank, rank_optim in enumerate(optim):
        file = rank_optim.state.file
        if rank_optim.n_ranks != len(optim):
            raise CorruptError(
                f"the file records {rank_optim.n_ranks} ranks, but the checkpoint has files from "
                f"{len(optim)} ranks",
                file=file,
                rank=str(rank),
                hint="remove the files that an older run with more ranks left behind",
            )
        if rank_optim.stage != head.stage:
            raise CorruptError(
                f"the file is from ZeRO-{rank_optim.stage}, but rank 0's file is from "
                f"ZeRO-{head.stage}",
                file=file,
                rank=str(rank),
            )
        if len(rank_optim.fp32) != len(head.fp32):
            raise CorruptError(
                f"the file has {len(rank_optim.fp32)} flat groups, but rank 0's file has "
                f"{len(head.fp32)}",
                file=file,
                rank=str(rank),
            )
    # Fewer model files are reported when they are read.
    if head.stage == 3 and len(files.zero_model) > len(optim):
        raise CorruptError(
            f"there are {len(files.zero_model)} model states files, but {len(optim)} "
            "optimizer states files",
            file=files.zero_model[-1],
            hint="remove the files that an older run with more ranks left behind",
        )


STEP = "step"


def states_by_parameter(
    store: ReadStore,
    partition: Partition,
    shapes: Mapping[str, Shape],
    optim: Sequence[OptimStates],
) -> tuple[dict[str, dict[str, object]], list[Dropped]]:
    """Return the optimizer's states by parameter, and those that cannot be divided among them.

    Args:
        shapes: shapes of the parameters in the flat groups.
        optim: the optimizer files by rank.

    Returns:
        Parameter → state name → ``Tensor`` or ``WholeObject``, for parameters that have a state;
        and the record of the other states, with the reason.

    Raises:
        CorruptError: the ranks have different states, or a state is shorter than the weights.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    # A state is flat or one value for its group; other states cannot be assigned to parameters.
    kinds = [_group_kinds(store, optim, group) for group in range(len(optim[0].fp32))]
    dropped = [
        Dropped((f"optimizer state {state!r} of flat group {group}",), _reason(kinds[group], state))
        for group, group_kinds in enumerate(kinds)
        for state, kind in group_kinds.items()
        if kind is None
    ]
    flat = {state: _flat_arrays(optim, state) for group_kinds in kinds for state in group_kinds}
    # A parameter in several flat groups (ZeRO-3) has the states that all of them have.
    states: dict[str, dict[str, object]] = {}
    for name, shape in shapes.items():
        groups = partition.groups_of(name)
        for state, kind in kinds[groups[0]].items() if groups else ():
            if any(kinds[group].get(state) is None for group in groups):
                continue
            entry = tensor_in_groups(partition, name, shape, flat[state]) if kind == _FLAT else kind
            states.setdefault(name, {})[state] = entry
    return states, dropped


_FLAT = "flat"
_QUANTIZED = frozenset(f"{name}{number}" for name in ("state", "absmax", "qmap") for number in "12")
"""States of bitsandbytes before 0.49 that are codes, or belong to them."""
_WRAPPER = "__bnb_optimizer_quant_state__"
"""The mapping of these in bitsandbytes 0.49 and later."""


def _reason(kinds: Mapping[str, object], state: str) -> str:
    """Return why a state cannot be divided among parameters.

    Args:
        kinds: the states of the flat group, see ``_group_kinds``.
    """
    if state == _WRAPPER or (state in _QUANTIZED and "absmax1" in kinds):
        return (
            "8-bit bitsandbytes states in blocks of the flat group; only DeepSpeed can load them, "
            "on the same number of ranks"
        )
    return "it is neither a single value nor as long as the flat group"


def _group_kinds(store: ReadStore, optim: Sequence[OptimStates], group: int) -> dict[str, object]:
    """Return the states of a flat group by name, each as described at ``_state_kind``.

    Raises:
        CorruptError: the ranks have different states, or one is shorter than the weights.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    names = list(optim[0].states[group])
    for rank, rank_states in enumerate(optim):
        if set(rank_states.states[group]) != set(names):
            raise rank_states.state.mismatch(
                f"for flat group {group}, rank {rank} has the states "
                f"{list_some(sorted(rank_states.states[group])) or 'none'}, but rank 0 has "
                f"{list_some(sorted(names)) or 'none'}"
            )
    # Codes are as long as the group, but of no use without their scales.
    undivided = _QUANTIZED if "absmax1" in names else frozenset()
    return {
        state: None if state in undivided else _state_kind(store, optim, group, state)
        for state in names
    }


def _state_kind(store: ReadStore, optim: Sequence[OptimStates], group: int, state: str) -> object:
    """Determine how a state of a flat group is divided among its parameters.

    Returns:
        ``_FLAT``, if the state is partitioned like the weights; the entry that every parameter of
        the group gets, if it is one value; None, if it is neither.
    """
    values = [rank.states[group][state] for rank in optim]
    arrays = [item for item in values if isinstance(item, StoredArray)]
    if not arrays:
        # A mapping of tensors is that of the rank's part of the group.
        holds_tensors = any(isinstance(node, TensorLeaf) for node in walk(values[0]))
        return None if holds_tensors else WholeObject(values[0])
    if len(arrays) < len(values):
        return None
    # Only the step may be a tensor of one axis; another state of one element is a short flat group.
    scalar_shapes = {(), (1,)} if state == STEP else {()}
    if scalar_shapes.issuperset(array.shape for array in arrays):
        _check_equal(store, arrays, state)
        return whole_tensor(arrays[0])
    if any(len(array.shape) != 1 or array.extent.strides is not None for array in arrays):
        return None
    # Longer states are padded, as the weights may be; the padding is never read.
    for rank, array in zip(optim, arrays, strict=True):
        n = rank.fp32[group].shape[0]
        if array.shape[0] < n:
            raise rank.state.mismatch(
                f"state {state!r} of flat group {group} has {array.shape[0]} elements, but its "
                f"weights have {n} elements"
            )
    return _FLAT


def _flat_arrays(optim: Sequence[OptimStates], state: str) -> list[list[StoredArray]]:
    """Return the arrays of a state: rank → flat group → array.

    In place of a group that lacks the state, which is never read, there is the array of its
    weights.
    """
    arrays = []
    for rank in optim:
        values = (group_states.get(state) for group_states in rank.states)
        arrays.append([
            value if isinstance(value, StoredArray) else fp32
            for value, fp32 in zip(values, rank.fp32, strict=True)
        ])  # fmt: skip
    return arrays


def _check_equal(store: ReadStore, arrays: Sequence[StoredArray], state: str) -> None:
    """Raise unless a scalar state is the same on every rank.

    Raises:
        ReplicaMismatchError: names the first rank whose value differs from that of rank 0.
    """
    first = None
    for rank, array in enumerate(arrays):
        data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
        first = data if first is None else first
        if data != first:
            raise ReplicaMismatchError(
                f"the state {state!r} differs from rank 0's",
                file=array.extent.file,
                rank=str(rank),
                hint=MIXED_STEPS_HINT,
            )
