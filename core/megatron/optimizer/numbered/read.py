"""The numbered optimizer of rank files (``core.megatron.optimizer.numbered.content``) by global names: reading.

On every rank, ``core.megatron.optimizer.groups`` finds which parameter has which number; then states are those of their
parameters, and groups of several ranks that have the same identity are one. The settings must agree, as must the number
of steps.
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
from core.megatron.model.facts import Facts
from core.megatron.optimizer.groups import Assignment, Policy, Slots, Trained, assign, masters_of, policies_of
from core.megatron.optimizer.merged_groups import MergedGroups
from core.megatron.optimizer.numbered.content import STEP_NAME, StoredGroup, StoredOptimizer, stored_optimizer
from core.megatron.optimizer.proof import is_master
from core.megatron.optimizer.rank_state import Param, ParamState, RankFile, RankStates
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf

_PROVEN = 512
"""Masters of a group that are compared on the first rank of a stage; on others, which repeat its structure, one is."""


@dataclass(slots=True)
class _Found:
    """What was read so far.

    Args:
        names: of the states that the first parameter with any has, and where that was.
        steps: arrays that are the number of steps.
        step: it as a number, and the rank that says so.
        entries: other entries, and the rank that has them.
        beside: key of a tensor among entries or settings → its copies.
    """

    states: list[ParamState] = field(default_factory=list)
    names: tuple[tuple[str, ...], str] | None = None
    steps: list[StoredArray] = field(default_factory=list)
    step: tuple[object, str] | None = None
    entries: tuple[Mapping[str, object], str] | None = None
    beside: dict[str, list[StoredArray]] = field(default_factory=dict)


def read_numbered(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: Facts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """The FP32 or Float16 optimizer of a rank catalog; see ``core.megatron.reshard.rank_optimizer.read_states``.

    Raises:
        MissingShardError: a rank has no optimizer, a parameter lacks states.
        UnsupportedError: names do not fit the groups, or in several ways; states of a kind that is not resharded.
        CorruptError: ranks contradict each other.
    """
    found = _Found()
    merged = MergedGroups(lambda new, old: found.beside.setdefault(new, []).append(_array(catalog, old)))
    policies = tuple(policies_of(fields_of(catalog.args)))
    proven_stages: set[int] = set()
    is_param: dict[str, bool] = {}
    has_masters: tuple[bool, str] | None = None
    for file in files:
        rule = "optim.numbers"
        try:
            stored = stored_optimizer(file.root.get("optimizer"), rank=file.folder, report=report)
            has_masters = has_masters or (stored.has_masters, file.folder)
            if stored.has_masters != has_masters[0]:
                what = f"only one of this optimizer and that of {has_masters[1]} has masters"
                raise CorruptError(what, rank=file.folder)
            params = [param for param in file.params if _is_param(param, rules, is_param)]
            is_first = file.rank.pp not in proven_stages
            proven_stages.add(file.rank.pp)
            rule = "optim.groups"
            made = _assignment(catalog, params, stored, file, policies, rules, store, is_first=is_first)
            held = [[params[i] for i in members] for members in made]
            for group, members in zip(stored.groups, held, strict=True):
                _add_states(found, catalog, group, members, report, rank=file.folder)
            rule = "optim.entries"
            for entries in stored.entries:
                _add_entries(found, catalog, entries, rank=file.folder)
            rule = "optim.settings"
            names = [_global_names(members, facts, rules) for members in held]
            merged.add(file.folder, zip((group.settings for group in stored.groups), names, strict=True))
        except CheckpointingException as err:
            report(err.breaking("optim.missing" if file.root.get("optimizer") is None else rule))
    _check_complete(found)
    step = TensorLeaf(STEP) if found.steps else None if found.step is None else found.step[0]
    return RankStates(
        Optimizer(
            kind="float16" if has_masters is not None and has_masters[0] else "fp32",
            groups=merged.groups(),
            states=() if found.names is None else found.names[0],
            step=step,
            entries={} if found.entries is None else found.entries[0],
            omits_empty=merged.omits_empty,
        ),
        found.states,
        steps=found.steps,
        beside=found.beside,
    )


def _is_param(param: Param, rules: Rules, known: dict[str, bool]) -> bool:
    """Whether a tensor is a parameter; notes it by its local name, which ranks repeat."""
    found = known.get(param.name)
    if found is None:
        found = known[param.name] = rules.is_param(param.chunk.global_names(param.name)[0][1])
    return found


def _array(catalog: Catalog, key: str) -> StoredArray:
    ranks = catalog.facet(RankFacts)
    array = None if ranks is None or ranks.arrays is None else ranks.arrays.get(key)
    if array is None:
        array = catalog.fragments(key)[0].array
    assert array is not None
    return array


def _global_names(members: Iterable[Param], facts: Facts, rules: Rules) -> list[str]:
    """What the parameters are called in the whole model; a tied copy has its original's name."""
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
    """Which parameters a rank's groups have.

    Args:
        is_first: of its stage: more masters are compared.
    """
    trained = [
        Trained(param.name, param.array.shape, param.array.dtype, rules.expert_of(param.name) is not None)
        for param in params
    ]
    slots = [_slots(catalog, group) for group in stored.groups]
    known: dict[tuple[int, int, int], bool] = {}

    def agrees(i: int, number: int, place: int) -> bool:
        masters = stored.groups[number].masters
        assert masters is not None and store is not None
        step = len(masters) // _PROVEN + 1 if is_first else len(masters)
        return place % step != step // 2 or is_own(i, number, place)

    def is_own(i: int, number: int, place: int) -> bool:
        masters = stored.groups[number].masters
        assert masters is not None and store is not None
        which = (i, number, place)
        if which not in known:
            known[which] = is_master(store, _array(catalog, masters[place].key), params[i].array)
        return known[which]

    can_prove = store is not None and stored.has_masters
    try:
        return assign(
            trained, slots, policies, agrees=agrees if can_prove else None, decides=is_own if can_prove else None
        )
    except CheckpointingException as err:
        err.rank = err.rank or file.folder
        raise


def _slots(catalog: Catalog, group: StoredGroup) -> Slots:
    """A group's shapes: of each entry that of its first state, the number of steps aside."""
    shapes = []
    for states in group.states:
        leaves = (leaf for name, leaf in states.items() if name != STEP_NAME and isinstance(leaf, TensorLeaf))
        first = next(leaves, None)
        shapes.append(None if first is None else catalog.meta(first.key).shape)
    masters = None if group.masters is None else [catalog.meta(leaf.key).shape for leaf in group.masters]
    return Slots(group.settings, shapes, masters)


def _add_states(
    found: _Found, catalog: Catalog, group: StoredGroup, members: Sequence[Param], report: Report, *, rank: str
) -> None:
    """Takes the states of a group's parameters."""
    if group.masters is not None:
        half = masters_of(range(len(members)), [Trained(p.name, p.array.shape, p.array.dtype, False) for p in members])
        for i, master in zip(half, group.masters, strict=True):
            found.states.append(ParamState(members[i], MASTER, _array(catalog, master.key)))
    for param, states in zip(members, group.states, strict=True):
        try:
            _add_state(found, catalog, param, states, rank=rank)
        except CheckpointingException as err:
            report(err.breaking("optim.states"))


def _add_state(found: _Found, catalog: Catalog, param: Param, states: Mapping[str, object], *, rank: str) -> None:
    """Takes the states of one parameter."""
    names = tuple(name for name in states if name != STEP_NAME)
    if found.names is None:
        found.names = (names, f"{param.name} of {rank}")
    if set(names) != set(found.names[0]):
        raise MissingShardError(
            f"it has the optimizer states {_listed(names)}, but {found.names[1]} has {_listed(found.names[0])}",
            key=param.name,
            rank=rank,
        )
    for name in names:
        leaf = states[name]
        if not isinstance(leaf, TensorLeaf) or catalog.meta(leaf.key).shape != param.array.shape:
            raise UnsupportedError(
                f"the optimizer state {name} does not have its parameter's shape {param.array.shape}",
                key=param.name,
                rank=rank,
                hint="leave the optimizer out with --no-optim",
                rule="optim.shape",
            )
        found.states.append(ParamState(param, name, _array(catalog, leaf.key)))
    _add_step(found, catalog, states.get(STEP_NAME), param.name, rank=rank)


def _add_step(found: _Found, catalog: Catalog, step: object, name: str, *, rank: str) -> None:
    """Takes a parameter's number of steps, which is that of all."""
    kind = type(step) if step is None or isinstance(step, TensorLeaf) else int
    if found.step is None:
        found.step = (step, rank)
    before = found.step[0]
    before_kind = type(before) if before is None or isinstance(before, TensorLeaf) else int
    if kind is not before_kind or (kind is int and step != before):
        raise CorruptError(
            f"the optimizer made {_shown(step)} steps here, {_shown(before)} in {found.step[1]}",
            key=name,
            rank=rank,
            hint="the ranks' files are not of one checkpoint, or one is damaged",
            rule="optim.step",
        )
    if isinstance(step, TensorLeaf):
        array = _array(catalog, step.key)
        if array.n_bytes > 8 or (found.steps and array.dtype != found.steps[0].dtype):
            raise CorruptError("the number of steps is not one number", key=name, rank=rank)
        found.steps.append(array)


def _add_entries(found: _Found, catalog: Catalog, entries: Mapping[str, object], *, rank: str) -> None:
    """Takes what a member of the optimizer has beside groups and states: equal on all ranks."""

    def new_key(path: str, old: str) -> str:
        made = f"optimizer.entries.{path}"
        found.beside.setdefault(made, []).append(_array(catalog, old))
        return made

    made = renamed_leaves(dict(entries), new_key)
    assert isinstance(made, dict)
    if found.entries is None:
        found.entries = (made, rank)
    for name in dict.fromkeys([*found.entries[0], *made]):
        if name not in made or name not in found.entries[0] or not same(made[name], found.entries[0][name]):
            raise CorruptError(f"the optimizer's entry {name} is not that of {found.entries[1]}", rank=rank)


def _check_complete(found: _Found) -> None:
    """Steps of several ranks have one shape, as their fragments need."""
    shapes = {array.shape for array in found.steps}
    if len(shapes) > 1:
        raise CorruptError(f"the optimizer's steps have the shapes {sorted(shapes)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _shown(step: object) -> str:
    return "no number of" if step is None else "a tensor's number of" if isinstance(step, TensorLeaf) else repr(step)
