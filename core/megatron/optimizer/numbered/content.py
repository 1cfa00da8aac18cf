"""The entry ``optimizer`` of a rank file whose states are numbered.

::

    FP32Optimizer     {"state": {id: {["step",] "exp_avg", "exp_avg_sq"}},
                       "param_groups": [{…, "params": [id …]}]}
    Float16Optimizer  {"optimizer": {as FP32Optimizer}, ["grad_scaler": …,]
                       "fp32_from_fp16_params": [[master weights …] of each group]}
    ChainedOptimizer  the entry of its only optimizer, or a list: [dense, experts];
                      with Muon, whose only state is ``momentum_buffer``:
                      [Muon, Muon of experts, Adam, Adam of experts], those that exist

Ids number the parameters of all groups of one optimizer. Only fp16 and bf16 parameters have master
weights. Older files have the names ``optimizer_state_dict`` and ``fp32_from_fp16``, which Megatron
still reads.

Source: megatron-core 0.16.1 ``core/optimizer/{optimizer,muon}.py``; Megatron-LM d98e8a64, pinned in
tests/golden (``mcore_legacy/dense_gqa/*_optim``).

Not supported: states of another shape than their parameter: the factors of SOAP, and of adaptive
Muon with ``normuon`` or ``namo`` (Megatron-LM HEAD), which depend on the layout (Megatron itself
cannot save them in torch_dist); Adafactor and Adam-mini, which no Megatron has; chains of other
optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from core.engine.catalog.optimizer_keys import FACTORS
from core.errors import CorruptError, MissingShardError, Report, UnsupportedError, raising
from core.megatron.optimizer.groups import HINT, member_of
from core.pickle.fields import FieldReader, list_or_empty, mapping_or_empty
from core.pickle.inert import TensorLeaf, as_mapping
from core.values import dataclass

INNER = ("optimizer", "optimizer_state_dict")
MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
STEP_NAME = "step"


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of a rank's file.

    Args:
        settings: the settings, without ``params``.
        states: name → state of each of its parameters; the number of steps is among them.
        masters: the stored master weights; None for an optimizer without master weights.
    """

    settings: Mapping[str, object]
    states: Sequence[Mapping[str, object]]
    masters: Sequence[TensorLeaf] | None


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """All chained optimizers of a rank.

    Args:
        groups: groups of all optimizers, one after the other.
        entries: for each optimizer, name → entry other than groups and states.
        has_masters: the optimizers are Float16Optimizers.
    """

    groups: Sequence[StoredGroup]
    entries: Sequence[Mapping[str, object]]
    has_masters: bool


def stored_optimizer(
    value: object, *, rank: str, is_layer_wise: bool = False, report: Report = raising
) -> StoredOptimizer:
    """Return the optimizer of a rank.

    Args:
        value: the entry ``optimizer``, or the content of a file of the layer-wise optimizer.
        rank: name of the rank directory, for messages.
        is_layer_wise: the optimizer is distributed by layers.
        report: receives states without a parameter (rule ``optim.numbers``); by default, raises
            them.

    Raises:
        MissingShardError: the rank has no optimizer, or its master weights are missing.
        UnsupportedError: the chained optimizers are not of the known kinds, or there are entries
            that are not resharded.
        CorruptError: the entry differs from the module's description.
    """
    members = [_read_member(item, report, rank=rank) for item in _split_chain(value, rank=rank)]
    if len({member.has_masters for member in members}) > 1:
        raise CorruptError("only some of the chained optimizers have master weights", rank=rank)
    if len(members) > 1:
        # Muon precedes Adam; each has one optimizer for dense parameters and one for experts, or
        # one for both if they are distributed by layers.
        kinds = [
            sorted({member_of(group.settings) for group in member.groups}) for member in members
        ]
        order = [kind for of_member in kinds for kind in of_member]
        is_split = len(order) == len(members)
        if order != sorted(set(order)) or not (is_split or is_layer_wise):
            factored = {
                FACTORS[name]
                for member in members
                for group in member.groups
                for states in group.states
                for name in states
                if name in FACTORS
            }
            owner = f" ({', '.join(sorted(factored))} is one of them)" if factored else ""
            raise UnsupportedError(
                f"the rank has {len(members)} chained optimizers{owner}; only Muon and Adam, each "
                "for dense parameters or for experts, are supported",
                rank=rank,
                hint=HINT,
            )
    return StoredOptimizer(
        [group for member in members for group in member.groups],
        [entries for member in members for entries in member.entries],
        members[0].has_masters,
    )


def _split_chain(value: object, *, rank: str) -> list[object]:
    """Return the entries of the chained optimizers, or of the only one."""
    if value is None:
        raise MissingShardError(
            "this rank's file has no optimizer, but other ranks' files do", rank=rank
        )
    by_number = as_mapping(value)
    if by_number is not None and by_number and all(isinstance(name, int) for name in by_number):
        value = [item for _, item in sorted(by_number.items(), key=lambda pair: int(str(pair[0])))]
    members = list(value) if isinstance(value, (list, tuple)) else [value]
    if not members:
        raise CorruptError("the list of optimizers is empty", rank=rank)
    return members


def _read_member(value: object, report: Report, *, rank: str) -> StoredOptimizer:
    """Read one optimizer of a chain, FP32 or Float16."""
    entries = _as_names(value, "an optimizer", rank=rank)
    inner = next((name for name in INNER if name in entries), None)
    if inner is None:
        groups = _read_groups(entries, None, report, rank=rank)
        del entries["state"], entries["param_groups"]
        return StoredOptimizer(groups, [entries], has_masters=False)

    # A Float16Optimizer wraps torch's optimizer, and has master weights.
    torch_entry = entries.pop(inner)
    name = next((name for name in MASTERS if name in entries), None)
    if name is None:
        raise _error_without_masters(torch_entry, rank=rank)
    reader = FieldReader(rank=rank)
    masters = [
        reader.read_list(group, f"a group of {name}")
        for group in reader.read_list(entries.pop(name), name)
    ]

    # torch's optimizer has nothing but states and groups.
    torch_entries = _as_names(torch_entry, inner, rank=rank)
    unknown = sorted(set(torch_entries) - {"state", "param_groups"})
    if unknown:
        raise UnsupportedError(
            f"the optimizer has entries that cannot be resharded: {', '.join(unknown)}", rank=rank
        )
    groups = _read_groups(torch_entries, masters, report, rank=rank)
    return StoredOptimizer(groups, [entries], has_masters=True)


def _error_without_masters(inner: object, *, rank: str) -> MissingShardError:
    """Return the error for an optimizer without master weights.

    If its groups list no parameters, the optimizer is a distributed one.
    """
    listed = list_or_empty(mapping_or_empty(inner).get("param_groups"))
    groups = [mapping_or_empty(item) for item in listed]
    if not groups or any("params" in group for group in groups):
        return MissingShardError(f"the optimizer has no {MASTERS[0]}", rank=rank)
    return MissingShardError(
        "no rank has distrib_optim.pt, which contains the states of a distributed optimizer",
        rank=rank,
        hint="copy the checkpoint again, with all of its files, or drop the optimizer with "
        "--no-optim",
    )


def _read_groups(
    inner: Mapping[str, object],
    masters: Sequence[Sequence[object]] | None,
    report: Report,
    *,
    rank: str,
) -> list[StoredGroup]:
    """Read the groups of a torch optimizer's state dict.

    Args:
        inner: entry with ``state`` and ``param_groups``.
        masters: master weights of each group; None for an optimizer without master weights.
    """
    reader = FieldReader(rank=rank)
    listed = reader.read_list(inner.get("param_groups"), "the optimizer's param_groups")
    state = reader.read_mapping(inner.get("state"), "the optimizer's state")
    if masters is not None and len(masters) != len(listed):
        raise CorruptError(
            f"the optimizer has master weights for {len(masters)} param groups, but it has "
            f"{len(listed)} param groups",
            rank=rank,
        )

    # Read group by group; a parameter's number is in one group only.
    grouped: set[object] = set()
    groups = []
    for number, item in enumerate(listed):
        group = _as_names(item, f"param group {number}", rank=rank)
        ids = reader.read_ints(
            group.pop("params", None),
            f"params of param group {number}",
            expected="a list of parameter numbers",
        )
        repeated = next((i for i, count in Counter(ids).items() if count > 1), None)
        if repeated is not None:
            raise CorruptError(f"param group {number} lists parameter {repeated} twice", rank=rank)
        if not grouped.isdisjoint(ids):
            raise CorruptError(
                f"param group {number} lists parameters of a different group", rank=rank
            )
        grouped.update(ids)
        states = [
            _as_names(state.get(i, {}), f"the state of parameter {i}", rank=rank) for i in ids
        ]
        leaves = None
        if masters is not None:
            leaves = [leaf for leaf in masters[number] if isinstance(leaf, TensorLeaf)]
            if len(leaves) < len(masters[number]):
                raise CorruptError(
                    f"an entry in the master weights of param group {number} is not a tensor",
                    rank=rank,
                )
        groups.append(StoredGroup(group, states, leaves))

    # States without a parameter are reported and dropped.
    for key in state:
        if key not in grouped:
            problem = f"the optimizer has a state for {key!r}, which is in no param group"
            report(CorruptError(problem, rank=rank, rule="optim.numbers"))
    return groups


def _as_names(value: object, label: str, *, rank: str) -> dict[str, object]:
    """Return a copy of a dict with string keys; ``label`` is its name in messages."""
    return dict(FieldReader(rank=rank).read_names(value, label))
