"""CK40x: check that the optimizer of a Megatron checkpoint belongs to its parameters.

Rank files number the parameters or arrange them in flat buffers, without names: the assignment of
states to parameters follows from their order and is proven by the values
(``core.megatron.reshard.rank_optimizer``). From the headers level on, a few elements of each master
weight are compared with the weight.

Master weights that do not round to their weights are only a warning: averaged or edited weights and
those from float8 parameters look like that, and Megatron recomputes the weights from the master
weights.

Source: the sources cited by ``core.megatron.reshard.rank_optimizer``,
``core.megatron.optimizer.sharded.read`` and ``core.megatron.optimizer.proof``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts, WeightCopies
from core.engine.catalog.optimizer_keys import MASTER
from core.engine.catalog.stored import StoredArray
from core.errors import CheckpointingException, UnsupportedError
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.megatron.optimizer.rank_state import ParamState
    from core.megatron.reshard.problems import Understood

NUMBERS = get_code("CK401")
GROUPS = get_code("CK402")
SHAPE = get_code("CK403")
STATES = get_code("CK404")
SETTINGS = get_code("CK405")
STEP = get_code("CK406")
MASTERS = get_code("CK407")
MISSING = get_code("CK408")
BUFFERS = get_code("CK410")
NOT_HANDLED = get_code("CK411")
NOT_COMPARED = get_code("CK412")


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
"""Maximum number of master weights to compare, evenly spread."""


def check_rank_optimizers(subject: Subject) -> Iterator[Finding]:
    """Check the optimizer in rank files, rank by rank (CK401–CK411)."""
    view = subject.model
    model, catalog = view.understood, view.catalog
    ranks = None if catalog is None else catalog.facet(RankFacts)
    if model is None or catalog is None or ranks is None:
        return
    if ranks.optimizer_kind in (None, "optim.pt"):
        return
    if not model.files or not _can_judge_ranks(subject, model):
        return
    has_data = subject.level >= Level.HEADERS
    mismatches: list[Finding] = []
    if has_data:
        problems, states, mismatches = _prove_states(subject, catalog, model)
    else:
        problems, states = _read_states(subject, catalog, model, proves=False)
    for err in problems:
        yield from _report_problem(err, has_data=has_data)
    # The float16 optimizer is not distributed: each rank has the states of its own parameters.
    if ranks.optimizer_kind == "float16":
        yield from _find_missing_states(states, {err.rank for err in problems})
    yield from mismatches


def _can_judge_ranks(subject: Subject, model: Understood) -> bool:
    """Return whether parameters and rank files are complete enough to check the optimizer."""
    from core.megatron.model.topology import Topology

    view = subject.model
    # If the parameters themselves are wrong, the optimizer would seem not to match.
    wrong_parameters = ("layout.names", "layout.chunks", "layout.ranks_differ")
    if any(err.rule in wrong_parameters for err in view.problems):
        return False
    if any(err.rule in ("ranks.folders", "ranks.files") for err in subject.salvaged.problems):
        return False
    # With expert parallelism, a sample of the ranks does not represent the complete optimizer.
    return (
        not view.is_sample
        or view.catalog is None
        or view.catalog.facet(Topology) == model.facts.topology
    )


def _find_missing_states(
    states: Sequence[ParamState], excluded: Container[str | None]
) -> Iterator[Finding]:
    """Report parameters without states that have some on other ranks of their pipeline stage.

    A frozen parameter has no states on any rank.

    Args:
        excluded: ranks with other problems, which may be the cause.
    """
    # Pipeline stage → rank directory → names of the parameters with states.
    trained: dict[tuple[int, int], dict[str, set[str]]] = {}
    for state in states:
        ranks = trained.setdefault(state.param.chunk.where, {})
        ranks.setdefault(state.param.chunk.folder, set()).add(state.param.name)
    for ranks in trained.values():
        all_names = set().union(*ranks.values())
        for folder, names in ranks.items():
            for name in sorted(all_names - names) if folder not in excluded else ():
                yield STATES.finding(
                    "this rank has no optimizer states for the parameter, but other ranks do",
                    key=name,
                    rank=folder,
                    expected=f"states of {len(all_names)} parameters",
                    found=f"states of {len(names)}",
                )


def _read_states(
    subject: Subject, catalog: Catalog, model: Understood, *, proves: bool
) -> tuple[list[CheckpointingException], Sequence[ParamState]]:
    """Read the optimizer of all ranks.

    Args:
        proves: read data to prove which state belongs to which parameter.

    Returns:
        The problems, and the states of all ranks; no states if the last problem ended the reading.
    """
    from core.megatron.reshard.rank_optimizer import find_rank_states

    problems: list[CheckpointingException] = []
    store = subject.store if proves else None
    try:
        result = find_rank_states(
            catalog, model.files, model.facts, subject.rules, store=store, report=problems.append
        )
    except CheckpointingException as err:
        return [*problems, err], ()
    return problems, result.states


def _prove_states(
    subject: Subject, catalog: Catalog, model: Understood
) -> tuple[list[CheckpointingException], Sequence[ParamState], list[Finding]]:
    """Read the optimizer with a proof by values, and compare the master weights with the weights.

    Returns:
        The problems, the states of all ranks, and the master weights that differ (CK407).
    """
    problems, states = _read_states(subject, catalog, model, proves=True)
    if not any(err.rule in ("optim.groups", "optim.buffers") for err in problems):
        return problems, states, list(_compare_masters(subject, catalog, states))
    # The proof failed. Assign the states by their order alone: if master weights differ then, the
    # values are wrong and not the layout; if none does, the problems of the proof stand.
    problems_of_order, states = _read_states(subject, catalog, model, proves=False)
    mismatches = list(_compare_masters(subject, catalog, states))
    return problems_of_order if mismatches else problems, states, mismatches


def _report_problem(err: CheckpointingException, *, has_data: bool) -> Iterator[Finding]:
    """Convert an error to a finding, unless it only means that a proof needs data."""
    # Without data, several assignments may be possible, which is an UnsupportedError.
    is_unknown = isinstance(err, UnsupportedError) and err.rule in (
        None,
        "optim.groups",
        "optim.buffers",
        "optim.remainders",
    )
    if is_unknown and not has_data:
        return
    code = (
        NOT_HANDLED
        if is_unknown and err.rule != "optim.groups"
        else _BY_RULE.get(err.rule or "", BUFFERS)
    )
    yield code.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span)


def _compare_masters(
    subject: Subject, catalog: Catalog, states: Sequence[ParamState]
) -> Iterator[Finding]:
    """Compare a sample of the master weights in rank files with the weights (CK407)."""
    masters = [state for state in states if state.state == MASTER]
    for state in masters[:: len(masters) // _MOST + 1]:
        yield from _compare_master(
            subject,
            catalog,
            state.array,
            state.param.array,
            key=state.param.name,
            rank=state.param.chunk.folder,
        )


def _compare_master(
    subject: Subject,
    catalog: Catalog,
    master: StoredArray,
    weight: StoredArray,
    *,
    key: str,
    rank: str | None = None,
) -> Iterator[Finding]:
    """Report a master weight that does not round to its weight, or cannot be rounded to it."""
    from core.megatron.optimizer.proof import is_master

    try:
        if is_master(subject.store, master, weight):
            return
    except UnsupportedError as err:  # a dtype without rounding
        yield _not_compared(err, file=weight.extent.file, key=key, rank=rank)
        return
    except CheckpointingException:
        return  # damaged data, which other checks report
    yield MASTERS.finding(
        "in a sample of the elements, the fp32 master weight does not round to the weight",
        file=weight.extent.file,
        key=key,
        rank=rank,
        expected=f"the {weight.dtype} weight",
        found="other values",
    )


def _not_compared(
    err: UnsupportedError, *, file: str, key: str | None = None, rank: str | None = None
) -> Finding:
    """Return the note that weights could not be compared with their master weights."""
    return NOT_COMPARED.finding(
        f"the weights could not be compared with their master weights ({err.message})",
        file=file,
        key=key,
        rank=rank,
    )


def check_global_optimizer(subject: Subject) -> Iterator[Finding]:
    """Check the optimizer of torch_dist and zarr checkpoints."""
    from core.megatron.optimizer.proof import pairs_of_masters
    from core.megatron.reshard.unshard import unshard

    view = subject.model
    catalog, model = view.catalog, view.understood
    if catalog is None or model is None or model.files or subject.catalog is None or view.problems:
        return
    # Unsharding interprets the complete optimizer state; its error is the finding.
    has_data = subject.level >= Level.HEADERS
    try:
        unsharded = unshard(catalog, rules=subject.rules, store=subject.store if has_data else None)
    except CheckpointingException as err:
        if not any(finding.code.startswith("CK4") for finding in subject.findings):
            yield from _unreadable_optimizer(subject, catalog, err, has_data=has_data)
        return
    pairs = list(pairs_of_masters(unsharded)) if has_data else []
    for key, weight, master in pairs[:: len(pairs) // _MOST + 1]:
        yield from _compare_master(subject, unsharded, master, weight, key=key)


def _unreadable_optimizer(
    subject: Subject, catalog: Catalog, err: CheckpointingException, *, has_data: bool
) -> Iterator[Finding]:
    """Report an optimizer that cannot be read, unless the weights cannot be read either."""
    from core.megatron.reshard.unshard import unshard

    try:
        unshard(catalog, rules=subject.rules, optim="drop")
    except CheckpointingException:
        return
    if isinstance(err, UnsupportedError):
        if has_data:
            yield NOT_HANDLED.finding(err.message, file=err.file, key=err.key, rank=err.rank)
        return
    yield BUFFERS.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span)


def check_weight_copies(subject: Subject) -> Iterator[Finding]:
    """Compare a sample of DeepSpeed's master weights with the model's weights (CK407)."""
    from core.megatron.optimizer.proof import find_different_copies

    copies = None if subject.catalog is None else subject.catalog.facet(WeightCopies)
    if copies is None:
        return
    try:
        different = find_different_copies(subject.store, copies.pairs())
    except UnsupportedError as err:  # a dtype without rounding
        yield _not_compared(err, file=err.file or subject.store.label)
        return
    except CheckpointingException:
        return  # damaged data, which other checks report
    for key, copy in different:
        yield MASTERS.finding(
            "in a sample of the elements, the fp32 master weight does not round to the weight",
            file=copy.extent.file,
            key=key,
            expected=f"the {copy.dtype} weight",
            found="other values",
        )


CHECKS = (
    Check(check_weight_copies, Level.HEADERS, formats=("deepspeed",)),
    Check(check_rank_optimizers, formats=("megatron",)),
    Check(check_global_optimizer, formats=("torch_dist", "zarr")),
)
