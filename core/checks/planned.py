"""CK901–CK903: the answer to ``--plan-for``, whether the checkpoint can be loaded or resharded as asked.

Nothing is estimated: the job is prepared as ``ckpt reshard`` and ``ckpt convert`` prepare theirs, up to the point where
bytes would move, so that what fits here fits there. Without a request nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.plan_request import SIZES, Request
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
    "it cannot be loaded or resharded as asked",
    "ask for other sizes; ckpt inspect says what can be done",
)
POSSIBLE = Code("CK902", Severity.NOTE, "how it is loaded or resharded as asked", "run what it says")
PARTLY = Code(
    "CK903",
    Severity.NOTE,
    "what would not be carried to what was asked",
    "see whether the training needs it; the source keeps it",
)

CODES = (IMPOSSIBLE, POSSIBLE, PARTLY)


def planned(subject: Subject) -> Iterator[Finding]:
    """Report whether, and how, the checkpoint can be loaded or resharded as ``--plan-for`` asks."""
    if subject.plan_for is None:
        return

    yield from answer(subject, subject.plan_for)


CHECKS = (Check(planned),)


_TIED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Optimizers in torch_dist that load only at the TP and PP that they were saved with."""


def answer(subject: Subject, request: Request) -> Iterator[Finding]:
    """Report CK901 if it cannot be done; otherwise CK902, which says how, and CK903 for what would be missing."""
    from core.convert.prepare import prepare

    if subject.format is None:
        yield IMPOSSIBLE.finding("nothing can be planned: the checkpoint cannot be read")
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
    lost: CheckpointingException | None = None
    for optim in ("carry", "drop"):
        try:
            with prepare(replace(job, optim=optim)) as prepared:
                if lost is not None:
                    yield _refused(lost, request, code_is_error=False)
                yield from _possible(subject, request, prepared, without_optim=lost is not None)
                return
        except CheckpointingException as err:
            if lost is not None or isinstance(err, CapacityError):
                yield _refused(lost or err, request, code_is_error=True)
                return
            lost = err


def _topology(request: Request) -> TopologyChange | None:
    tp, pp, vpp, ep, etp = map(request.sizes.get, SIZES)
    return TopologyChange(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp) if request.sizes else None


def _usual_target(format: Format) -> str:
    """Return the format to plan for where none is named: the source's own if it has a layout."""
    return (
        format.name if format.lay_out is not None and (format.partition == "ranks" or format.is_mcore) else "megatron"
    )


def _refused(err: CheckpointingException, request: Request, *, code_is_error: bool) -> Finding:
    code = IMPOSSIBLE if code_is_error else PARTLY
    lead = f"{request} is not possible" if code_is_error else f"{request} is possible only without the optimizer"
    return code.finding(
        f"{lead}: {err.message}",
        file=err.file,
        key=err.key,
        rank=err.rank,
        severity=None if code_is_error else Severity.WARNING,
        hint=err.hint if code_is_error else "leave the optimizer out: --no-optim",
    )


def _possible(subject: Subject, request: Request, prepared: Prepared, *, without_optim: bool) -> Iterator[Finding]:
    """Report how it is done, and what is lost on the way."""
    as_it_is = _loads_as_it_is(prepared, request)
    if as_it_is is not None and not without_optim:
        yield POSSIBLE.finding(f"{request}: {as_it_is}", hint="nothing is to be done")
        return
    plan = prepared.plan
    yield POSSIBLE.finding(
        f"{request}: ckpt writes it as {prepared.target_format.name}: {_amount(plan.read_bytes)} to read, "
        f"{_amount(plan.file_bytes)} to write in {len(prepared.files):,} files, {_amount(plan.memory_bytes)} of memory",
        hint=_command(subject, request, prepared, without_optim=without_optim),
    )
    for text in prepared.dropped:
        yield PARTLY.finding(f"not carried: {text}")


def _loads_as_it_is(prepared: Prepared, request: Request) -> str | None:
    """Return why nothing needs to be written; None if something does."""
    from core.megatron.optimizer.form import optim_format_of

    source, target = prepared.source, prepared.target_format
    if source.format.name != target.name:
        return None
    sizes = _sizes_of(prepared)
    if sizes is not None and all(sizes.get(name, 1) == size for name, size in request.sizes.items()):
        return "it was saved so"
    if not source.format.is_mcore or source.format.partition == "ranks":
        return None
    kind = optim_format_of(dict.fromkeys(source.catalog.tensors), dict.fromkeys(source.catalog.objects))
    return None if kind in _TIED else f"Megatron loads {source.format.name} at these sizes as it is"


def _sizes_of(prepared: Prepared) -> dict[str, int] | None:
    """Return the sizes that the checkpoint was saved with; None where nothing states them."""
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


def _command(subject: Subject, request: Request, prepared: Prepared, *, without_optim: bool) -> str:
    """Return the command line that does it."""
    is_same = prepared.source.format.name == prepared.target_format.name
    words = ["run: ckpt reshard", quote(str(subject.path)), "DST"]
    words += [f"--{name}-new {size}" for name, size in request.sizes.items()]
    words += [] if is_same else [f"--to {request.to or prepared.target_format.name}"]
    words += ["--no-optim"] if without_optim else []
    return " ".join(words)


def _amount(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"
