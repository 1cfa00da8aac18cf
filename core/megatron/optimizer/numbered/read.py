"""Reading the numbered optimizer of rank files (``core.megatron.optimizer.numbered.content``).

On every rank, ``core.megatron.optimizer.groups`` assigns the numbers to parameters. States then get
the global names of their parameters, and groups of several ranks with the same identity become one.
The ranks must agree on the groups' settings and on the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import FACTORS, MASTER, STEP, Optimizer
from core.engine.catalog.stored import StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    raising,
)
from core.files.store import ReadStore
from core.megatron.extras.common_state import renamed_leaves
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.groups import (
    HALF,
    HINT,
    Assignment,
    Policy,
    Slots,
    Trained,
    assign,
    is_muon,
    policies_of,
)
from core.megatron.optimizer.merged_groups import MergedGroups
from core.megatron.optimizer.numbered.content import (
    STEP_NAME,
    StoredGroup,
    StoredOptimizer,
    stored_optimizer,
)
from core.megatron.optimizer.numbered.layer_wise import DataRank, layer_wise_files
from core.megatron.optimizer.proof import is_master
from core.megatron.optimizer.rank_state import Param, ParamState, RankFile, RankStates, stored_array
from core.megatron.rules.rules import Rules
from core.pickle.equality import are_same, describe_difference
from core.pickle.inert import TensorLeaf
from core.values import dataclass

_PROVEN = 512
"""Number of parameters per group whose master weights are compared on a stage's first rank.

The other ranks of the stage repeat its structure; one parameter per group is compared there.
"""


def read_numbered(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: ModelFacts,
    rules: Rules,
    *,
    store: ReadStore | None,
    is_layer_wise: bool = False,
    report: Report = raising,
) -> RankStates:
    """Read the FP32 or Float16 optimizer of a rank catalog.

    ``core.megatron.reshard.rank_optimizer.find_rank_states`` explains the other arguments.

    Args:
        is_layer_wise: the optimizer is distributed by layers, in files of its own.

    Raises:
        MissingShardError: a rank has no optimizer, or a parameter lacks states.
        UnsupportedError: no assignment of parameters to groups fits, or several do; a state cannot
            be resharded.
        CorruptError: ranks contradict each other.
    """
    collected = _CollectedStates(catalog)
    merged = MergedGroups(collected.note_tensor)
    policies = tuple(policies_of(fields_of(catalog.args)))
    sources: Iterable[tuple[RankFile, str, object, DataRank | None]]
    if is_layer_wise:
        sources = layer_wise_files(catalog, files, facts.topology)
    else:
        sources = ((file, file.folder, file.root.get("optimizer"), None) for file in files)
    proven: set[tuple[int, int]] = set()  # stage, and data parallel rank

    is_param: dict[str, bool] = {}  # by local name, which the ranks repeat
    for file, name, entry, data_rank in sources:
        rule = "optim.numbers"  # of the current check
        try:
            stored = stored_optimizer(entry, rank=name, is_layer_wise=is_layer_wise, report=report)
            collected.check_kind(stored, rank=name)

            # Assign numbers to parameters; the first rank of a stage is proven more thoroughly.
            for param in file.params:
                if param.name not in is_param:
                    global_name = param.chunk.global_names(param.name)[0][1]
                    is_param[param.name] = rules.is_param(global_name)
            params = [param for param in file.params if is_param[param.name]]
            stage = file.rank.pp, 0 if data_rank is None else data_rank.number
            is_first = stage not in proven
            proven.add(stage)
            rule = "optim.groups"
            assignment = _assign_numbers(
                catalog,
                params,
                stored,
                policies,
                rules,
                store,
                rank=name,
                is_first=is_first,
                data_rank=data_rank,
            )
            members = [[params[i] for i in numbers] for numbers in assignment]

            # Collect the states, the other entries and the groups by global names.
            for group, group_params in zip(stored.groups, members, strict=True):
                collected.add_group(group, group_params, report, rank=name)
            rule = "optim.entries"
            for entries in stored.entries:
                collected.add_entries(entries, rank=name)
            rule = "optim.settings"
            names = [_global_names(group_params, facts, rules) for group_params in members]
            merged.add(name, zip((group.settings for group in stored.groups), names, strict=True))
        except CheckpointingException as err:
            report(err.breaking("optim.missing" if entry is None else rule))
    return collected.states_with(merged)


def _global_names(members: Iterable[Param], facts: ModelFacts, rules: Rules) -> list[str]:
    """Return the global names of parameters; a tied copy gets its original's name."""
    names = (name for param in members for _, name in param.chunk.global_names(param.name))
    return [rules.rule_of(name).tied or name for name in names] if facts.is_tied else list(names)


def _assign_numbers(
    catalog: Catalog,
    params: Sequence[Param],
    stored: StoredOptimizer,
    policies: Sequence[Policy],
    rules: Rules,
    store: ReadStore | None,
    *,
    rank: str,
    is_first: bool,
    data_rank: DataRank | None,
) -> Assignment:
    """Return the parameters of each of a rank's groups.

    Args:
        is_first: the rank is the first of its stage; more master weights are compared.
        data_rank: selects the rank's parameters, if the optimizer is distributed by layers.

    Raises:
        UnsupportedError: no assignment fits, or several do.
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

    # Comparisons read files, so results are cached, and usually a sample of parameters is enough.
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
            master = stored_array(catalog, masters[place].key)
            results[pair] = is_master(store, master, params[i].array)
        return results[pair]

    can_prove = store is not None and stored.has_masters
    try:
        return assign(
            trained,
            slots,
            policies,
            agrees=agrees if can_prove else None,
            decides=is_own if can_prove else None,
            share=None
            if data_rank is None
            else partial(data_rank.share, params=trained, groups=slots),
        )
    except CheckpointingException as err:
        err.rank = err.rank or rank
        raise


def _slots(catalog: Catalog, group: StoredGroup) -> Slots:
    """Return the shapes of a group's entries, which are those of their states.

    States that differ in shape, or that are factors by their names, do not show the parameter's.
    """
    shapes: list[Shape | None] = []
    for states in group.states:
        state_shapes = {
            catalog.tensor(leaf.key).shape
            for name, leaf in states.items()
            if name != STEP_NAME and name not in FACTORS and isinstance(leaf, TensorLeaf)
        }
        shapes.append(state_shapes.pop() if len(state_shapes) == 1 else None)
    masters = (
        None
        if group.masters is None
        else [catalog.tensor(leaf.key).shape for leaf in group.masters]
    )
    return Slots(group.settings, shapes, masters)


@dataclass(slots=True)
class _CollectedStates:
    """The states and entries of the ranks that were read so far.

    Args:
        catalog: the rank catalog.
        has_masters: the optimizers have master weights; and the first rank.
        states: states of all parameters.
        names: whether Muon trains a parameter → names of the first such parameter's states; and
            that parameter, for messages.
        steps: arrays that hold the number of steps.
        step: the first parameter's number of steps; and its rank. Muon counts none.
        entries: entries other than groups and states; and the first rank.
        copies: key of a tensor among entries or settings → its copies.
    """

    catalog: Catalog
    has_masters: tuple[bool, str] | None = None
    states: list[ParamState] = field(default_factory=list)
    names: dict[bool, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    steps: list[StoredArray] = field(default_factory=list)
    step: tuple[object, str] | None = None
    entries: tuple[Mapping[str, object], str] | None = None
    copies: dict[str, list[StoredArray]] = field(default_factory=dict)

    def note_tensor(self, new: str, old: str) -> None:
        """Add a rank's tensor ``old`` to the copies of the tensor ``new``."""
        self.copies.setdefault(new, []).append(stored_array(self.catalog, old))

    def check_kind(self, stored: StoredOptimizer, *, rank: str) -> None:
        """Raise unless all ranks, or none, have master weights."""
        if self.has_masters is None:
            self.has_masters = (stored.has_masters, rank)
        if stored.has_masters != self.has_masters[0]:
            raise CorruptError(
                f"the optimizer has {'' if stored.has_masters else 'no '}master weights, unlike in "
                f"{self.has_masters[1]}",
                rank=rank,
            )

    def add_group(
        self, group: StoredGroup, members: Sequence[Param], report: Report, *, rank: str
    ) -> None:
        """Add the states of a group's parameters.

        Args:
            members: the group's parameters.
            report: receives the problems of single parameters.
        """
        # Master weights are listed without gaps for the parameters that have any.
        if group.masters is not None:
            params = [param for param in members if param.array.dtype in HALF]
            for param, master in zip(params, group.masters, strict=True):
                array = stored_array(self.catalog, master.key)
                self.states.append(ParamState(param, MASTER, array))
        for param, states in zip(members, group.states, strict=True):
            try:
                self._add_param(param, states, rank=rank, by_muon=is_muon(group.settings))
            except CheckpointingException as err:
                report(err.breaking("optim.states"))

    def _add_param(
        self, param: Param, states: Mapping[str, object], *, rank: str, by_muon: bool
    ) -> None:
        """Add the states of one parameter, which Muon trains or another optimizer."""
        # Every parameter must have the same states as the first one.
        names = tuple(name for name in states if name != STEP_NAME)
        first_names, first = self.names.setdefault(by_muon, (names, f"{param.name} of {rank}"))
        if set(names) != set(first_names):
            raise MissingShardError(
                f"the parameter's optimizer states are {', '.join(names) or 'missing'}, but those "
                f"of {first} are {', '.join(first_names) or 'missing'}",
                key=param.name,
                rank=rank,
                hint="drop the optimizer with --no-optim",
            )

        # States of other shapes, such as factored ones, cannot be cut like the parameter.
        owner = next((f" of {FACTORS[name]}" for name in names if name in FACTORS), "")
        for name in names:
            leaf = states[name]
            if not isinstance(leaf, TensorLeaf):
                raise UnsupportedError(
                    f"the optimizer state {name}{owner} is not a tensor",
                    key=param.name,
                    rank=rank,
                    hint=HINT,
                    rule="optim.shape",
                )
            shape = self.catalog.tensor(leaf.key).shape
            if shape != param.array.shape or FACTORS.get(name) == "SOAP":  # of a square matrix
                raise UnsupportedError(
                    f"the optimizer state {name}{owner} has shape {shape} and its parameter has "
                    f"shape {param.array.shape}, so ckpt cannot split the state like the parameter",
                    key=param.name,
                    rank=rank,
                    hint=HINT,
                    rule="optim.shape",
                )
            self.states.append(ParamState(param, name, stored_array(self.catalog, leaf.key)))
        if not by_muon or STEP_NAME in states:
            self._add_step(states.get(STEP_NAME), param.name, rank=rank)

    def _add_step(self, step: object, name: str, *, rank: str) -> None:
        """Add a parameter's number of steps, which must equal that of the other parameters.

        Args:
            step: None, a number, or a tensor; tensors are compared by the engine.
            name: the parameter, for messages.
        """
        if self.step is None:
            self.step = (step, rank)
        first, first_rank = self.step
        kind = _step_kind(step)
        if kind is not _step_kind(first) or (kind is int and step != first):
            raise CorruptError(
                f"the optimizer's number of steps is {_step_text(step)}, but {_step_text(first)} "
                f"in {first_rank}",
                key=name,
                rank=rank,
                hint="check that all rank directories are intact and from the same checkpoint",
                rule="optim.step",
            )
        if isinstance(step, TensorLeaf):
            array = stored_array(self.catalog, step.key)
            if array.n_bytes > 8 or (self.steps and array.dtype != self.steps[0].dtype):
                raise CorruptError(
                    "the optimizer's number of steps is not a single number but a tensor of "
                    f"{array.n_bytes} bytes ({array.dtype})",
                    key=name,
                    rank=rank,
                )
            self.steps.append(array)

    def add_entries(self, entries: Mapping[str, object], *, rank: str) -> None:
        """Add entries other than groups and states, which must be equal on all ranks."""
        renamed = renamed_leaves(dict(entries), "optimizer.entries", self.note_tensor)
        assert isinstance(renamed, dict)
        if self.entries is None:
            self.entries = (renamed, rank)
        first, first_rank = self.entries
        for name in dict.fromkeys([*first, *renamed]):
            if name not in renamed or name not in first or not are_same(renamed[name], first[name]):
                path, expected, actual = describe_difference(first, renamed, name)
                raise CorruptError(
                    f"the optimizer's entry {path} is {actual}, but {expected} in {first_rank}",
                    rank=rank,
                )

    def states_with(self, merged: MergedGroups) -> RankStates:
        """Return the collected states, as the optimizer of these groups.

        Raises:
            CorruptError: the numbers of steps have different shapes.
        """
        # The copies of the steps become fragments of one tensor.
        shapes = {array.shape for array in self.steps}
        if len(shapes) > 1:
            raise CorruptError(
                "the optimizer's numbers of steps have different shapes: "
                f"{' and '.join(map(str, sorted(shapes)))}"
            )
        step = None if self.step is None else self.step[0]
        return RankStates(
            Optimizer(
                kind="float16" if self.has_masters is not None and self.has_masters[0] else "fp32",
                groups=merged.groups(),
                states=tuple(
                    dict.fromkeys(name for names, _ in self.names.values() for name in names)
                ),
                step=TensorLeaf(STEP) if self.steps else step,
                entries={} if self.entries is None else self.entries[0],
                omits_empty=merged.omits_empty,
            ),
            self.states,
            steps=self.steps,
            beside=self.copies,
        )


def _step_kind(step: object) -> type:
    return type(step) if step is None or isinstance(step, TensorLeaf) else int


def _step_text(step: object) -> str:
    if step is None:
        return "missing"
    return "a tensor" if isinstance(step, TensorLeaf) else repr(step)
