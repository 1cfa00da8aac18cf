"""CK901–CK903: whether the checkpoint can be loaded or resharded as ``--plan-for`` requests.

Nothing is estimated: the job is prepared as ``ckpt reshard`` and ``ckpt convert`` prepare theirs,
up to the point where bytes would move, so a request that passes here can be carried out. Without a
request nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.plan_request import SIZES, PlanRequest
from core.convert.job import MIB, Job, TopologyChange
from core.errors import CapacityError, CheckpointingException

if TYPE_CHECKING:
    from core.checks.finding import Finding
    from core.checks.subject import Subject
    from core.convert.prepare import Prepared
    from core.formats.format import Format

IMPOSSIBLE = Code(
    "CK901",
    Severity.ERROR,
    "cannot be loaded or resharded as requested",
    "request other sizes; ckpt inspect shows what is possible",
)
POSSIBLE = Code(
    "CK902", Severity.NOTE, "how to load or reshard as requested", "run the command shown"
)
PARTLY = Code(
    "CK903",
    Severity.NOTE,
    "what would not be carried over",
    "check whether the training needs it; the source keeps it",
)

CODES = (IMPOSSIBLE, POSSIBLE, PARTLY)


def plan_as_requested(subject: Subject) -> Iterator[Finding]:
    """Report whether, and how, the checkpoint can be loaded or resharded as ``--plan-for`` asks."""
    if subject.plan_for is None:
        return

    yield from answer_request(subject, subject.plan_for)


CHECKS = (Check(plan_as_requested),)


_TIED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Optimizer formats in torch_dist that Megatron loads only at the TP and PP they were saved
with.
"""


def answer_request(subject: Subject, request: PlanRequest) -> Iterator[Finding]:
    """Report that the request is impossible (CK901), or how it is done (CK902, CK903)."""
    from core.convert.prepare import prepare

    if subject.format is None:
        yield IMPOSSIBLE.finding("no plan is possible: the checkpoint cannot be read")
        return
    to = request.to or _usual_target(subject.format)
    job = Job(
        src=subject.path,
        dst=subject.path.parent / f".{subject.path.name}.ckpt-plan",
        to=to,
        topology=_topology(request),
        keeps_layout=True,
        rules=request.rules,
        memory_bytes=request.memory_bytes,
    )
    # The first attempt carries the optimizer. If that fails, the second one tells whether the optimizer was to blame.
    optim_error: CheckpointingException | None = None
    for optim in ("carry", "drop"):
        try:
            with prepare(replace(job, optim=optim)) as prepared:
                if optim_error is not None:
                    yield _refused(optim_error, request, code_is_error=False)
                yield from _possible(
                    subject, request, prepared, without_optim=optim_error is not None
                )
                return
        except CheckpointingException as err:
            if optim_error is not None or isinstance(err, CapacityError):
                yield _refused(optim_error or err, request, code_is_error=True)
                return
            optim_error = err


def _topology(request: PlanRequest) -> TopologyChange | None:
    """Return the requested sizes as a change of topology; None without any."""
    tp, pp, vpp, ep, etp = map(request.sizes.get, SIZES)
    return TopologyChange(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp) if request.sizes else None


def _usual_target(format: Format) -> str:
    """Return the format to plan for by default: the source's own if it has a layout."""
    return (
        format.name
        if format.lay_out is not None and (format.partition == "ranks" or format.is_mcore)
        else "megatron"
    )


def _refused(err: CheckpointingException, request: PlanRequest, *, code_is_error: bool) -> Finding:
    """Return the finding for a request that fails, or that works only without the optimizer."""
    code = IMPOSSIBLE if code_is_error else PARTLY
    lead = (
        f"{request} is not possible"
        if code_is_error
        else f"{request} is possible only without the optimizer"
    )
    return code.finding(
        f"{lead}: {err.message}",
        file=err.file,
        key=err.key,
        rank=err.rank,
        severity=None if code_is_error else Severity.WARNING,
        hint=err.hint if code_is_error else "drop the optimizer with --no-optim",
    )


def _possible(
    subject: Subject, request: PlanRequest, prepared: Prepared, *, without_optim: bool
) -> Iterator[Finding]:
    """Report how the request is carried out, and what is lost on the way."""
    as_it_is = _loads_as_it_is(prepared, request)
    if as_it_is is not None and not without_optim:
        yield POSSIBLE.finding(f"{request}: {as_it_is}", hint="no conversion needed")
        return
    plan = prepared.plan
    yield POSSIBLE.finding(
        f"{request}: ckpt writes it as {prepared.target_format.name}: read {_mebibytes(plan.read_bytes)}, "
        f"write {_mebibytes(plan.file_bytes)} in {len(prepared.files):,} files, memory {_mebibytes(plan.memory_bytes)}",
        hint=_command(subject, request, prepared, without_optim=without_optim),
    )
    for text in prepared.dropped:
        yield PARTLY.finding(f"not carried over: {text}")


def _loads_as_it_is(prepared: Prepared, request: PlanRequest) -> str | None:
    """Return why the checkpoint can be loaded without writing anything; None if it cannot."""
    from core.megatron.optimizer.form import optim_format_of

    source, target = prepared.source, prepared.target_format
    if source.format.name != target.name:
        return None
    sizes = _sizes_of(prepared)
    if sizes is not None and all(
        sizes.get(name, 1) == size for name, size in request.sizes.items()
    ):
        return "the checkpoint was saved with these sizes"
    if not source.format.is_mcore or source.format.partition == "ranks":
        return None
    kind = optim_format_of(
        dict.fromkeys(source.catalog.tensors), dict.fromkeys(source.catalog.objects)
    )
    return None if kind in _TIED else f"Megatron loads {source.format.name} at these sizes as it is"


def _sizes_of(prepared: Prepared) -> dict[str, int] | None:
    """Return the parallel sizes that the checkpoint was saved with; None if nothing states them."""
    from core.megatron.model.args import topology_of
    from core.megatron.model.topology import Topology

    catalog = prepared.source.catalog
    topology = catalog.facet(Topology)
    if topology is None:
        args = catalog.args
        if args is None and "args" in catalog.objects:
            args = catalog.objects["args"].value
        if args is None:
            return None
        topology = topology_of(args)
    sizes = {"tp": topology.tp, "pp": topology.pp, "vpp": topology.vpp or 1}
    return {**sizes, "ep": topology.ep, "etp": topology.expert_tp}


def _command(
    subject: Subject, request: PlanRequest, prepared: Prepared, *, without_optim: bool
) -> str:
    """Return the ``ckpt reshard`` command line for the request."""
    is_same = prepared.source.format.name == prepared.target_format.name
    words = ["run: ckpt reshard", quote(str(subject.path)), "DST"]
    words += [f"--{name}-new {size}" for name, size in request.sizes.items()]
    words += [] if is_same else [f"--to {request.to or prepared.target_format.name}"]
    words += ["--no-optim"] if without_optim else []
    return " ".join(words)


def _mebibytes(n_bytes: int) -> str:
    """Format a byte count in MiB."""
    return f"{n_bytes / MIB:,.1f} MiB"
