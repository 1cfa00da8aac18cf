"""Reading of the numbered optimizer of rank files (``core.megatron.optimizer.numbered.content``) by
global names.

On every rank, ``core.megatron.optimizer.groups`` finds which parameter has which number; states
then go with their parameters, and groups of several ranks that have the same identity become one.
Their settings must agree, as must the numbers of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.catalog.optimizer_keys import MASTER, STEP, Optimizer
from core.catalog.stored import StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    raising,
)
from core.files.store import ReadStore
from core.megatron.extras.common_state import renamed_leaves, same
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.groups import (
    Assignment,
    Policy,
    Slots,
    Trained,
    assign,
    masters_of,
    policies_of,
)
from core.megatron.optimizer.merged_groups import MergedGroups
from core.megatron.optimizer.numbered.content import (
    STEP_NAME,
    StoredGroup,
    StoredOptimizer,
    stored_optimizer,
)
from core.megatron.optimizer.proof import is_master
from core.megatron.optimizer.rank_state import Param, ParamState, RankFile, RankStates
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf

_PROVEN = 512
"""Number of masters of a group that are compared on the first rank of a stage.

One is compared on the other ranks, which repeat its structure.
"""


def read_numbered(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: ModelFacts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """Read the FP32 or Float16 optimizer of a rank catalog.

    ``core.megatron.reshard.rank_optimizer.read_states`` explains the arguments.

    Raises:
        MissingShardError: a rank has no optimizer, a parameter lacks states.
        UnsupportedError: names do not fit the groups, or in several ways; states of a kind that is
            not resharded.
        CorruptError: ranks contradict each other.
    """
    collected = _CollectedStates(catalog)
    merged = MergedGroups(collected.note_tensor)
    policies = tuple(policies_of(fields_of(catalog.args)))
    proven_stages: set[int] = set()
    is_param: dict[str, bool] = {}
    has_masters: tuple[bool, str] | None = None
    for file in files:
        rule = "optim.numbers"  # of the check that is under way
        try:
            stored = stored_optimizer(file.root.get("optimizer"), rank=file.folder, report=report)
            has_masters = has_masters or (stored.has_masters, file.folder)
            if stored.has_masters != has_masters[0]:
                problem = f"only one of this optimizer and that of {has_masters[1]} has masters"
                raise CorruptError(problem, rank=file.folder)

            # Find out which parameter has which number; the first rank of a stage is examined closely.
            params = [param for param in file.params if _is_param(param, rules, is_param)]
            is_first = file.rank.pp not in proven_stages
            proven_stages.add(file.rank.pp)
            rule = "optim.groups"
            assignment = _assignment(
                catalog, params, stored, file, policies, rules, store, is_first=is_first
            )
            members = [[params[i] for i in of_group] for of_group in assignment]

            for group, of_group in zip(stored.groups, members, strict=True):
                collected.add_group(group, of_group, report, rank=file.folder)
            rule = "optim.entries"
            for entries in stored.entries:
                collected.add_entries(entries, rank=file.folder)
            rule = "optim.settings"
            names = [_global_names(of_group, facts, rules) for of_group in members]
            merged.add(
                file.folder, zip((group.settings for group in stored.groups), names, strict=True)
            )
        except CheckpointingException as err:
            report(err.breaking("optim.missing" if file.root.get("optimizer") is None else rule))
    collected.check_steps()
    step = None if collected.step is None else collected.step[0]
    return RankStates(
        Optimizer(
            kind="float16" if has_masters is not None and has_masters[0] else "fp32",
            groups=merged.groups(),
            states=() if collected.names is None else collected.names[0],
            step=TensorLeaf(STEP) if collected.steps else step,
            entries={} if collected.entries is None else collected.entries[0],
            omits_empty=merged.omits_empty,
        ),
        collected.states,
        steps=collected.steps,
        beside=collected.copies,
    )


def _is_param(param: Param, rules: Rules, cache: dict[str, bool]) -> bool:
    """Return whether a tensor is a parameter; remembered by its local name, which ranks repeat."""
    is_param = cache.get(param.name)
    if is_param is None:
        is_param = cache[param.name] = rules.is_param(param.chunk.global_names(param.name)[0][1])
    return is_param


def _array(catalog: Catalog, key: str) -> StoredArray:
    ranks = catalog.facet(RankFacts)
    array = None if ranks is None or ranks.arrays is None else ranks.arrays.get(key)
    if array is None:
        array = catalog.fragments(key)[0].array
    assert array is not None
    return array


def _global_names(members: Iterable[Param], facts: ModelFacts, rules: Rules) -> list[str]:
    """Return the global names of parameters; a tied copy has its original's name."""
    names = (name for param in members for _, name in param.chunk.global_names(param.name))
    return [rules.rule_of(name).tied or name for name in names] if facts.is_tied else list(names)


def _assignment(
    catalog: Catalog,
    params: Sequence[Param],
    stored: StoredOptimizer,
    file: RankFile,
    policies: Sequence[Policy],
    rules: Rules,
    store: ReadStore | None,
    *,
    is_first: bool,
) -> Assignment:
    """Return the parameters of each of a rank's groups.

    Args:
        is_first: the rank is the first of its stage: more masters are compared.
    """
    trained = [
        Trained(
            param.name,
            param.array.shape,
            param.array.dtype,
            rules.expert_of(param.name) is not None,
        )
        for param in params
    ]
    slots = [_slots(catalog, group) for group in stored.groups]

    # Comparing reads files: results are kept, and usually a sample of the masters is enough.
    results: dict[tuple[int, int, int], bool] = {}

    def agrees(i: int, number: int, place: int) -> bool:
        masters = stored.groups[number].masters
        assert masters is not None and store is not None
        step = len(masters) // _PROVEN + 1 if is_first else len(masters)
        return place % step != step // 2 or is_own(i, number, place)

    def is_own(i: int, number: int, place: int) -> bool:
        masters = stored.groups[number].masters
        assert masters is not None and store is not None
        pair = (i, number, place)
        if pair not in results:
            results[pair] = is_master(store, _array(catalog, masters[place].key), params[i].array)
        return results[pair]

    can_prove = store is not None and stored.has_masters
    try:
        return assign(
            trained,
            slots,
            policies,
            agrees=agrees if can_prove else None,
            decides=is_own if can_prove else None,
        )
    except CheckpointingException as err:
        err.rank = err.rank or file.folder
        raise


def _slots(catalog: Catalog, group: StoredGroup) -> Slots:
    """Return the shapes in a group: for each entry that of its first state other than the number of
    steps.
    """
    shapes = []
    for states in group.states:
        leaves = (
            leaf
            for name, leaf in states.items()
            if name != STEP_NAME and isinstance(leaf, TensorLeaf)
        )
        first = next(leaves, None)
        shapes.append(None if first is None else catalog.meta(first.key).shape)
    masters = (
        None if group.masters is None else [catalog.meta(leaf.key).shape for leaf in group.masters]
    )
    return Slots(group.settings, shapes, masters)


@dataclass(slots=True)
class _CollectedStates:
    """The states and entries of the ranks that were read so far.

    Args:
        catalog: the rank catalog.
        states: states of all parameters.
        names: names of the states of the first parameter that has any, and where that was.
        steps: arrays that are the number of steps.
        step: the number of steps as the first parameter has it, and the rank of that.
        entries: entries other than groups and states, and the rank that has them.
        copies: key of a tensor among entries or settings → its copies.
    """

    catalog: Catalog
    states: list[ParamState] = field(default_factory=list)
    names: tuple[tuple[str, ...], str] | None = None
    steps: list[StoredArray] = field(default_factory=list)
    step: tuple[object, str] | None = None
    entries: tuple[Mapping[str, object], str] | None = None
    copies: dict[str, list[StoredArray]] = field(default_factory=dict)

    def note_tensor(self, new: str, old: str) -> None:
        """Add a copy of the tensor that gets the key ``new``."""
        self.copies.setdefault(new, []).append(_array(self.catalog, old))

    def add_group(
        self, group: StoredGroup, members: Sequence[Param], report: Report, *, rank: str
    ) -> None:
        """Add the states of a group's parameters."""
        if group.masters is not None:
            trained = [
                Trained(param.name, param.array.shape, param.array.dtype, False)
                for param in members
            ]
            for i, master in zip(
                masters_of(range(len(members)), trained), group.masters, strict=True
            ):
                self.states.append(ParamState(members[i], MASTER, _array(self.catalog, master.key)))
        for param, states in zip(members, group.states, strict=True):
            try:
                self._add_param(param, states, rank=rank)
            except CheckpointingException as err:
                report(err.breaking("optim.states"))

    def _add_param(self, param: Param, states: Mapping[str, object], *, rank: str) -> None:
        """Add the states of one parameter."""
        # Every parameter must have the states of the first one.
        names = tuple(name for name in states if name != STEP_NAME)
        if self.names is None:
            self.names = (names, f"{param.name} of {rank}")
        if set(names) != set(self.names[0]):
            raise MissingShardError(
                f"it has the optimizer states {_joined(names)}, but {self.names[1]} has {_joined(self.names[0])}",
                key=param.name,
                rank=rank,
            )
        for name in names:
            leaf = states[name]
            if (
                not isinstance(leaf, TensorLeaf)
                or self.catalog.meta(leaf.key).shape != param.array.shape
            ):
                raise UnsupportedError(
                    f"the optimizer state {name} does not have its parameter's shape {param.array.shape}",
                    key=param.name,
                    rank=rank,
                    hint="leave the optimizer out with --no-optim",
                    rule="optim.shape",
                )
            self.states.append(ParamState(param, name, _array(self.catalog, leaf.key)))
        self._add_step(states.get(STEP_NAME), param.name, rank=rank)

    def _add_step(self, step: object, name: str, *, rank: str) -> None:
        """Add a parameter's number of steps, which is that of all parameters: None, a number or a
        tensor.
        """
        if self.step is None:
            self.step = (step, rank)
        first, first_rank = self.step
        kind = _step_kind(step)
        if kind is not _step_kind(first) or (kind is int and step != first):
            raise CorruptError(
                f"the optimizer made {_step_text(step)} steps here, {_step_text(first)} in {first_rank}",
                key=name,
                rank=rank,
                hint="the ranks' files are not of one checkpoint, or one is damaged",
                rule="optim.step",
            )
        if isinstance(step, TensorLeaf):
            array = _array(self.catalog, step.key)
            if array.n_bytes > 8 or (self.steps and array.dtype != self.steps[0].dtype):
                raise CorruptError("the number of steps is not one number", key=name, rank=rank)
            self.steps.append(array)

    def add_entries(self, entries: Mapping[str, object], *, rank: str) -> None:
        """Add a member's entries other than groups and states; they must be equal on all ranks."""

        def new_key(path: str, old: str) -> str:
            new = f"optimizer.entries.{path}"
            self.note_tensor(new, old)
            return new

        renamed = renamed_leaves(dict(entries), new_key)
        assert isinstance(renamed, dict)
        if self.entries is None:
            self.entries = (renamed, rank)
        first, first_rank = self.entries
        for name in dict.fromkeys([*first, *renamed]):
            if name not in renamed or name not in first or not same(renamed[name], first[name]):
                raise CorruptError(
                    f"the optimizer's entry {name} is not that of {first_rank}", rank=rank
                )

    def check_steps(self) -> None:
        """Raise unless the steps of all ranks have one shape, as their fragments need."""
        shapes = {array.shape for array in self.steps}
        if len(shapes) > 1:
            raise CorruptError(f"the optimizer's steps have the shapes {sorted(shapes)}")


def _step_kind(step: object) -> type:
    return type(step) if step is None or isinstance(step, TensorLeaf) else int


def _step_text(step: object) -> str:
    return (
        "no number of"
        if step is None
        else "a tensor's number of"
        if isinstance(step, TensorLeaf)
        else repr(step)
    )


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
