"""``ckpt validate --plan-for``: whether a checkpoint can be loaded at, or resharded to, other parallel sizes.

Nothing is estimated: the job is prepared as ``ckpt reshard`` and ``ckpt convert`` prepare theirs, up to the point where
bytes would move, so that what fits here fits there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from core.checks.planned import IMPOSSIBLE, PARTLY, POSSIBLE
from core.errors import CapacityError, CheckpointingException, UsageError
from core.finding import Severity
from core.job import DEFAULT_MEMORY_BYTES, MIB, Job, TopologyChange

if TYPE_CHECKING:
    from core.checks.subject import Subject
    from core.convert import Prepared
    from core.finding import Finding
    from core.formats import Format

SIZES = ("tp", "pp", "vpp", "ep", "etp")
_TIED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Optimizers in torch_dist that load only at the TP and PP that they were saved with."""
_EXAMPLE = "for example --plan-for tp=4,pp=2,format=torch_dist"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    Args:
        sizes: parallel sizes; those that are not named stay the source's.
        to: the format to write; None for that of the source, or rank files where it has no layout.
        rules: a TOML file with additional layout rules.
        memory_bytes: as for ``core.job.Job``.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    to: str | None = None
    rules: Path | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.sizes.items()]
        return ",".join([*words, *([f"format={self.to}"] if self.to else [])])


def request_of(text: str, *, rules: Path | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Request:
    """The request that ``tp=4,pp=2,format=torch_dist`` is.

    Raises:
        UsageError: it is none.
    """
    sizes: dict[str, int] = {}
    to = None
    for part in text.split(","):
        name, equals, value = (word.strip().lower() for word in part.partition("="))
        if not equals or name in sizes or (name == "format" and to is not None):
            raise UsageError(f"--plan-for: {part!r} is not NAME=VALUE, each name once", hint=_EXAMPLE)
        if name == "format":
            to = _known_format(value)
        elif name in SIZES and value.isascii() and value.isdigit() and 1 <= int(value[:10]) < 2**31:
            sizes[name] = int(value[:10])
        else:
            what = f"{value!r} is no size" if name in SIZES else f"{name!r} is none of: {', '.join((*SIZES, 'format'))}"
            raise UsageError(f"--plan-for: {what}", hint=_EXAMPLE)
    return Request(sizes, to, rules, memory_bytes)


def _known_format(name: str) -> str:
    from core.formats import format_called

    try:
        format_called(name)
    except CheckpointingException as err:
        raise UsageError(f"--plan-for: {err.message}", hint=err.hint) from err
    return name


def answer(subject: Subject, request: Request) -> Iterator[Finding]:
    """CK901 if it cannot be done; otherwise CK902, which says how, and CK903 for what would be missing."""
    from core.convert import prepare

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
    """The format to plan for where none is named: the source's own if it has a layout."""
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
    """How it is done, and what is lost on the way."""
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
    """Why nothing needs to be written; None if something does."""
    from core.optim_format import optim_format_of

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
    """The sizes that the checkpoint was saved with; None where nothing says."""
    from core.layout_args import topology_of
    from core.topology import Topology

    catalog = prepared.source.catalog
    found = catalog.attrs.get("topology")
    args = catalog.attrs.get("args", catalog.objects["args"].value if "args" in catalog.objects else None)
    if not isinstance(found, Topology):
        if args is None:
            return None
        found = topology_of(args)
    return {"tp": found.tp, "pp": found.pp, "vpp": found.vpp or 1, "ep": found.ep, "etp": found.expert_tp}


def _command(subject: Subject, request: Request, prepared: Prepared, *, without_optim: bool) -> str:
    """The command line that does it."""
    is_same = prepared.source.format.name == prepared.target_format.name
    words = ["run: ckpt reshard", quote(str(subject.path)), "DST"]
    words += [f"--{name}-new {size}" for name, size in request.sizes.items()]
    words += [] if is_same else [f"--to {request.to or prepared.target_format.name}"]
    words += ["--no-optim"] if without_optim else []
    return " ".join(words)


def _amount(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"
