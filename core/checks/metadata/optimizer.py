"""CK40x: does the optimizer of a Megatron checkpoint belong to its parameters?

Rank files number the parameters or lay them out in flat buffers, without names: which is whose follows from their
order, and is proven by the values (``core.megatron.reshard.rank_optimizer``). From the headers on, masters are compared
with weights, on a few elements of each.

Masters that do not round to their weights are a warning only: weights that were averaged, edited or made of float8
parameters look like that, and Megatron makes the weights anew from the masters.

Source: what ``core.megatron.reshard.rank_optimizer``, ``core.megatron.optimizer.sharded.read`` and
``core.megatron.optimizer.proof`` cite.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.catalog.optimizer_keys import MASTER
from core.catalog.stored import StoredArray
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.errors import CheckpointingException, UnsupportedError
from core.megatron.model.topology import Topology
from core.megatron.optimizer.proof import is_master, pairs_of_masters
from core.megatron.optimizer.rank_state import ParamState
from core.megatron.reshard.problems import Understood
from core.megatron.reshard.rank_optimizer import read_states
from core.megatron.reshard.reshard import unshard

_WITHOUT = "use an older checkpoint, or start with a fresh optimizer (convert with --no-optim)"
_MIXED = "the rank directories are not of one step, or one is damaged: use an older checkpoint"
NUMBERS = Code("CK401", Severity.ERROR, "numbers of parameters contradict the states", _WITHOUT)
GROUPS = Code("CK402", Severity.ERROR, "the optimizer's groups do not fit the parameters", _WITHOUT)
SHAPE = Code("CK403", Severity.ERROR, "a state has not its parameter's shape", _WITHOUT)
STATES = Code("CK404", Severity.ERROR, "a parameter lacks states that others have", _WITHOUT)
SETTINGS = Code("CK405", Severity.ERROR, "ranks disagree about the optimizer's settings", _MIXED)
STEP = Code("CK406", Severity.ERROR, "the optimizer's steps disagree", _MIXED)
MASTERS = Code(
    "CK407",
    Severity.WARNING,
    "a master does not round to its weight",
    "weights or optimizer were changed after the last step; know which of them is right",
    Level.HEADERS,
)
MISSING = Code("CK408", Severity.ERROR, "ranks lack the optimizer that others have", _WITHOUT)
BUFFERS = Code("CK410", Severity.ERROR, "the optimizer's buffers make no sense", _WITHOUT)
NOT_HANDLED = Code(
    "CK411", Severity.NOTE, "an optimizer that is not understood", "convert with --no-optim, or to no other layout"
)

CODES = (NUMBERS, GROUPS, SHAPE, STATES, SETTINGS, STEP, MASTERS, MISSING, BUFFERS, NOT_HANDLED)

_BY_RULE = {
    "optim.numbers": NUMBERS,
    "optim.groups": GROUPS,
    "optim.shape": SHAPE,
    "optim.states": STATES,
    "optim.settings": SETTINGS,
    "optim.entries": SETTINGS,
    "optim.step": STEP,
    "optim.missing": MISSING,
    "optim.buffers": BUFFERS,
}
_MOST = 1 << 12
"""Masters that are compared, evenly spread."""


def of_ranks(subject: Subject) -> Iterator[Finding]:
    """What is wrong with the optimizer of rank files, rank by rank."""
    view = subject.model
    model, catalog = view.understood, view.catalog
    ranks = None if catalog is None else catalog.facet(RankFacts)
    if model is None or catalog is None or not model.files or ranks is None or ranks.optimizer_kind is None:
        return
    if any(err.rule in ("layout.names", "layout.chunks", "layout.ranks_differ") for err in view.problems):
        return  # the optimizer would seem not to fit, as the parameters are not right themselves
    if any(err.rule in ("ranks.folders", "ranks.files") for err in subject.salvaged.problems):
        return
    if view.is_sample and catalog.facet(Topology) != model.facts.topology:
        return  # with expert parallelism, some ranks do not stand for all of the optimizer
    has_data = subject.level >= Level.HEADERS
    problems, states = _states(subject, catalog, model, proves=has_data)
    strange: list[Finding] = []
    if has_data and any(err.rule in ("optim.groups", "optim.buffers") for err in problems):
        by_order, states = _states(subject, catalog, model, proves=False)
        strange = list(_strange(subject, catalog, states))
        if strange:  # by their order they fit, so that it is the values which do not
            problems = by_order
    elif has_data:
        strange = list(_strange(subject, catalog, states))
    for err in problems:
        yield from _finding(err, has_data=has_data)
    if ranks.optimizer_kind == "float16":
        yield from _untrained(states, {err.rank for err in problems})
    yield from strange


def _untrained(states: Sequence[ParamState], known: Container[str | None]) -> Iterator[Finding]:
    """Parameters that have states on other ranks of their stage: frozen ones are frozen everywhere.

    Args:
        known: ranks of which something is wrong already.
    """
    trained: dict[tuple[int, int], dict[str, set[str]]] = {}
    for state in states:
        ranks = trained.setdefault(state.param.chunk.where, {})
        ranks.setdefault(state.param.chunk.folder, set()).add(state.param.name)
    for ranks in trained.values():
        every = set().union(*ranks.values())
        for folder, names in ranks.items():
            for name in sorted(every - names) if folder not in known else ():
                yield STATES.finding(
                    "other ranks have optimizer states of this parameter, this one has none",
                    key=name,
                    rank=folder,
                    expected=f"states of {len(every)} parameters",
                    found=f"of {len(names)}",
                )


def _states(
    subject: Subject, catalog: Catalog, model: Understood, *, proves: bool
) -> tuple[list[CheckpointingException], Sequence[ParamState]]:
    """(what is wrong, the states of all ranks)."""
    problems: list[CheckpointingException] = []
    store = subject.store if proves else None
    try:
        found = read_states(catalog, model.files, model.facts, subject.rules, store=store, report=problems.append)
    except CheckpointingException as err:
        return [*problems, err], ()
    return problems, found.states


def _finding(err: CheckpointingException, *, has_data: bool) -> Iterator[Finding]:
    """The finding of an error; where nothing was read, it may be that only data can tell."""
    is_unknown = isinstance(err, UnsupportedError) and err.rule in (None, "optim.groups", "optim.buffers")
    if is_unknown and not has_data:
        return
    code = NOT_HANDLED if is_unknown and err.rule != "optim.groups" else _BY_RULE.get(err.rule or "", BUFFERS)
    yield code.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span)


def _strange(subject: Subject, catalog: Catalog, states: Sequence[ParamState]) -> Iterator[Finding]:
    """Masters of rank files that do not round to their weights."""
    masters = [state for state in states if state.state == MASTER]
    for state in masters[:: len(masters) // _MOST + 1]:
        yield from _compared(
            subject, catalog, state.array, state.param.array, key=state.param.name, rank=state.param.chunk.folder
        )


def _compared(
    subject: Subject, catalog: Catalog, master: StoredArray, weight: StoredArray, *, key: str, rank: str | None = None
) -> Iterator[Finding]:
    try:
        if is_master(subject.store, master, weight, bind=catalog.bind):
            return
    except CheckpointingException:
        return  # of a dtype that is not rounded to, or damaged, which is found elsewhere
    yield MASTERS.finding(
        "the master in fp32 does not round to the weight, on a sample of both",
        file=weight.extent.file,
        key=key,
        rank=rank,
        expected=f"the {weight.dtype} weight",
        found="other values",
    )


def of_global(subject: Subject) -> Iterator[Finding]:
    """What is wrong with the optimizer of torch_dist and zarr."""
    view = subject.model
    catalog, model = view.catalog, view.understood
    if catalog is None or model is None or model.files or subject.catalog is None or view.problems:
        return
    has_data = subject.level >= Level.HEADERS
    try:
        whole = unshard(catalog, rules=subject.rules, store=subject.store if has_data else None)
    except CheckpointingException as err:
        if not any(finding.code.startswith("CK4") for finding in subject.findings):
            yield from _of_whole(subject, catalog, err, has_data=has_data)
        return
    pairs = list(pairs_of_masters(whole)) if has_data else []
    for key, weight, master in pairs[:: len(pairs) // _MOST + 1]:
        yield from _compared(subject, whole, master, weight, key=key)


def _of_whole(subject: Subject, catalog: Catalog, err: CheckpointingException, *, has_data: bool) -> Iterator[Finding]:
    """The finding of an optimizer that is not understood, unless the weights are not, either."""
    try:
        unshard(catalog, rules=subject.rules, optim="drop")
    except CheckpointingException:
        return
    if isinstance(err, UnsupportedError):
        if has_data:
            yield NOT_HANDLED.finding(err.message, file=err.file, key=err.key, rank=err.rank)
        return
    yield BUFFERS.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span)


CHECKS = (Check(of_ranks, formats=("megatron",)), Check(of_global, formats=("torch_dist", "zarr")))
