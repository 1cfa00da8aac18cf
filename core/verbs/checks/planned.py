"""CK901–CK903: feasibility of loading or resharding the checkpoint as ``--plan-for`` requests.

Nothing is estimated: the job is prepared as ``ckpt reshard`` and ``ckpt convert`` prepare theirs,
up to the point where bytes would move, so a request that passes here can be carried out. Without a
request nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from core.errors import CapacityError, CheckpointingException
from core.values import n_text
from core.verbs.checks.finding import Severity, get_code
from core.verbs.checks.subject import Check

if TYPE_CHECKING:
    from core.verbs.checks.finding import Finding
    from core.verbs.checks.plan_request import PlanRequest
    from core.verbs.checks.subject import Subject
    from core.verbs.convert.prepared import Prepared

IMPOSSIBLE = get_code("CK901")
POSSIBLE = get_code("CK902")
PARTLY = get_code("CK903")


_FIXED_SIZES = ("dp_reshardable", "dp_zero_gather_scatter")
"""Optimizer formats of torch_dist that Megatron loads only at the TP and PP they were saved at."""


def plan_as_requested(subject: Subject) -> Iterator[Finding]:
    """Plan what ``--plan-for`` requests, and report the way (CK902, CK903) or the obstacle (CK901).

    Nothing is reported without a request.
    """
    request, format = subject.plan_for, subject.format
    if request is None:
        return
    if format is None:
        yield IMPOSSIBLE.finding(
            "the request cannot be planned, because the checkpoint cannot be read"
        )
        return
    from core.verbs.checks.plan_request import SIZES
    from core.verbs.convert.job import Job, TopologyChange
    from core.verbs.convert.prepare import prepare  # heavy, and seldom needed

    # By default, keep the source's format if it can hold another layout.
    keeps_format = format.lay_out is not None and format.has_layout
    tp, pp, vpp, ep, etp = map(request.sizes.get, SIZES)
    job = Job(
        src=subject.path,
        dst=subject.path.parent / f".{subject.path.name}.ckpt-plan",
        to=request.to or (format.name if keeps_format else "megatron"),
        topology=TopologyChange(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp) if request.sizes else None,
        is_reshard=True,
        rules=request.rules,
        memory_bytes=request.memory_bytes,
    )
    # The first attempt carries the optimizer. If it fails, a second one without the optimizer shows
    # whether the optimizer is the obstacle. A lack of space or memory (CapacityError) is final.
    optim_error: CheckpointingException | None = None
    for optim in ("carry", "drop"):
        try:
            with prepare(replace(job, optim=optim)) as prepared:
                if optim_error is not None:
                    yield _refusal(optim_error, request, without_optim=True)
                yield from _report_plan(
                    subject, request, prepared, without_optim=optim_error is not None
                )
                return
        except CheckpointingException as err:
            if optim_error is not None or isinstance(err, CapacityError):
                yield _refusal(optim_error or err, request, without_optim=False)
                return
            optim_error = err


def _refusal(err: CheckpointingException, request: PlanRequest, *, without_optim: bool) -> Finding:
    """Build the finding for a request that fails (CK901), or fails only with the optimizer (CK903).

    Args:
        without_optim: the request succeeds without the optimizer.
    """
    if without_optim:
        return PARTLY.finding(
            f"{request} is possible only without the optimizer: {err.message}",
            file=err.file,
            key=err.key,
            rank=err.rank,
            severity=Severity.WARNING,
            hint="drop the optimizer with --no-optim",
        )
    message = f"{request} is not possible: {err.message}"
    return IMPOSSIBLE.finding(message, file=err.file, key=err.key, rank=err.rank, hint=err.hint)


def _report_plan(
    subject: Subject, request: PlanRequest, prepared: Prepared, *, without_optim: bool
) -> Iterator[Finding]:
    """Report how the request can be carried out (CK902), and what would be lost (CK903)."""
    reason = _reason_to_load_directly(prepared, request)
    if reason is not None and not without_optim:
        yield POSSIBLE.finding(f"{request}: {reason}", hint="no conversion is needed")
        return
    plan, target = prepared.plan, prepared.target_format
    words = ["run: ckpt reshard", quote(str(subject.path)), "DST"]
    words += [f"--{name}-new {size}" for name, size in request.sizes.items()]
    if prepared.source.format is not target:
        words.append(f"--to {request.to or target.name}")
    if without_optim:
        words.append("--no-optim")
    yield POSSIBLE.finding(
        f"{request}: ckpt would read {_mebibytes(plan.read_bytes)} and write "
        f"{_mebibytes(plan.file_bytes)} ({target.name}, {n_text(len(prepared.files), 'file')}), "
        f"using {_mebibytes(plan.memory_bytes)} of memory",
        hint=" ".join(words),
    )
    for text in prepared.dropped:
        yield PARTLY.finding(f"not carried over: {text}")


def _reason_to_load_directly(prepared: Prepared, request: PlanRequest) -> str | None:
    """Return the reason why no conversion is needed; None if one is needed."""
    from core.megatron.optimizer.form import optim_format_of

    source = prepared.source
    if source.format is not prepared.target_format:
        return None
    # Every format can be loaded at the sizes at which it was saved.
    sizes = _saved_sizes(prepared)
    if sizes is not None and all(
        sizes.get(name, 1) == size for name, size in request.sizes.items()
    ):
        return "the checkpoint was saved with these sizes"
    if not source.format.has_common_state:
        return None
    # Megatron's distributed formats can be loaded at any sizes, except with such an optimizer.
    kind = optim_format_of(
        dict.fromkeys(source.catalog.tensors), dict.fromkeys(source.catalog.objects)
    )
    return (
        None
        if kind in _FIXED_SIZES
        else f"Megatron can load this {source.format.name} checkpoint at these sizes"
    )


def _saved_sizes(prepared: Prepared) -> dict[str, int] | None:
    """Return the parallel sizes that the checkpoint was saved at; None if not recorded."""
    from core.megatron.model.args import topology_of
    from core.megatron.model.topology import Topology

    catalog = prepared.source.catalog
    # The topology is that of the rank directories, or else of the training arguments.
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


def _mebibytes(n_bytes: int) -> str:
    """Format a byte count in MiB."""
    from core.verbs.convert.job import MIB

    return f"{n_bytes / MIB:,.1f} MiB"


CHECKS = (Check(plan_as_requested),)
