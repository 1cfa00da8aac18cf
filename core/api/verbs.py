"""The verbs of the command line as functions: what ``core.convert(…)`` and its like call.

Each builds the job that its command would build, and runs it in this process. Arguments have the
names of the options: ``--tp-new 4 --no-optim`` is ``tp_new=4, optim=False``. A new option of
``convert``, ``reshard`` and ``merge`` is added to ``core.verbs.convert.job`` only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.api.arguments import as_verb, takes_options
from core.errors import NoEffect, UsageError, refuse_without_effect
from core.files.remote_path import location_of
from core.progress import bytes_only
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS, Job, Report
from core.verbs.convert.job_options import (
    check_values,
    implied_format,
    list_texts,
    parse_file,
    parse_job,
    parse_memory,
)

if TYPE_CHECKING:
    from core.verbs.diff.result import Diff
    from core.verbs.inspect.summary import Summary
    from core.verbs.prune.run import Pruning
    from core.verbs.validate.run import Validation

AnyPath = str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) of the step that the data goes through."""
_NOT_IN_MERGE = frozenset(
    "iteration metadata_only optim dequantize dequantize_optim param_order".split()
)
"""Options that merge does not take: they move data, or concern one source."""


def _build_job(src: AnyPath, dst: AnyPath | None, options: Mapping[str, Any]) -> Job:
    """Return a job in the format of the options, else the one that they imply, else the source's.

    Raises:
        UsageError: options contradict each other, or a value is invalid.
    """
    dst_path = None if dst is None else location_of(dst)
    to = options.get("to") or implied_format(dst_path, options.get("names"))
    return parse_job(location_of(src), dst_path, {**options, "to": to})


def _list_locations(paths: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Return one or several paths as locations."""
    return [
        location_of(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    ]


def _parse_memory(memory: str | int | None) -> int:
    """Return a memory limit in bytes."""
    return DEFAULT_MEMORY_BYTES if memory is None else parse_memory(memory)


@as_verb
def inspect(
    path: AnyPath,
    *,
    iteration: int | None = None,
    missing_chunks: str = "fill",
    memory: str | int | None = None,
) -> Summary:
    """Read the metadata of a checkpoint and return what ``ckpt inspect`` shows.

    Args:
        path: a checkpoint, or a training root.
        iteration: which iteration of a training root.
        missing_chunks: ``fill`` zarr chunks that are not stored, or ``error`` to refuse them.
        memory: memory limit for objects, in bytes or as text: ``8GiB``.

    Raises:
        CheckpointingException: the path is not a checkpoint, or its metadata are damaged.
    """
    from core.engine.plan.memory import limit_objects
    from core.opening.open import open_checkpoint
    from core.verbs.inspect.summary import summarize

    with limit_objects(_parse_memory(memory)):
        checkpoint = open_checkpoint(
            location_of(path), iteration=iteration, missing_chunks=missing_chunks
        )
        try:
            return summarize(checkpoint)
        finally:
            checkpoint.store.close()


@as_verb
@takes_options()
def convert(
    src: AnyPath, dst: AnyPath | None = None, *, progress: Progress | None = None, **options: Any
) -> Report:
    """Write a checkpoint in another format, as ``ckpt convert`` does; all or nothing.

    Args:
        src: a checkpoint of any format, or a training root.
        dst: the directory or file to write; None for a name in the directory of ``src``.
        progress: called with (bytes done, bytes in total) from the copying threads.
        options: options of the command, in the types below or as text: ``rename={"a": "b"}``
            or ``rename=["a=b"]``. Without ``to``, the format is the one that ``names`` or the
            suffix of ``dst`` implies (``.pt``, ``.safetensors``), or else that of the source.

    Raises:
        CheckpointingException: the source is damaged, the destination cannot hold it, or an
            option contradicts it or has no effect. The destination is untouched.
    """
    from core.verbs.convert.run import run

    return run(_build_job(src, dst, options), progress=bytes_only(progress))


@as_verb
@takes_options()
def reshard(
    src: AnyPath, dst: AnyPath | None = None, *, progress: Progress | None = None, **options: Any
) -> Report:
    """Write a Megatron checkpoint with other parallel sizes, as ``ckpt reshard`` does.

    Args:
        src: a Megatron checkpoint, or a training root.
        dst: the directory to write; None for a name in the directory of ``src``.
        progress, options: as for ``convert``; at least one option changes the layout: a size such
            as ``tp_new``, the pipeline, ``experts``, ``vocab_size`` or ``to``.

    Raises:
        UsageError: no option changes the layout, or the model cannot be divided so.
        CheckpointingException: as for ``convert``.
    """
    from core.verbs.convert.options import check_reshard
    from core.verbs.convert.run import run

    dst_path = None if dst is None else location_of(dst)
    job = parse_job(location_of(src), dst_path, options, is_reshard=True)
    check_reshard(job, hint="pass one, such as tp_new=2")
    return run(job, progress=bytes_only(progress))


@as_verb
@takes_options(without=_NOT_IN_MERGE)
def merge(
    sources: Sequence[AnyPath],
    dst: AnyPath,
    *,
    average: bool = False,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    slerp: float | None = None,
    delta: bool = False,
    add_delta: Sequence[AnyPath] = (),
    scale: float | None = None,
    lora: AnyPath | None = None,
    replace: bool = False,
    keep_first: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Compute one checkpoint from several of the same model, as ``ckpt merge`` does.

    Args:
        sources: the checkpoints, in any formats and layouts; the result has the configuration of
            the first. Exactly one of the following eight says what to compute.
        dst: the directory or file to write.
        average: the mean of all sources.
        weights: a weighted sum, one number per source, which sum to 1.
        ema: the decay of an exponential moving average over the sources, the oldest first.
        slerp: the position between two sources, 0 for the first.
        delta: the first of two sources minus the second.
        add_delta: task vectors to add to the only source, each times ``scale``.
        lora: the directory of a LoRA adapter to fold into the only source.
        replace: the tensors of the second of two sources, and all others of the first.
        scale: factor of ``add_delta``; None for 1.
        keep_first: take integers and objects that differ from the first source.
        progress, options: as for ``convert``.

    Raises:
        UsageError: not exactly one computation is requested, or it does not suit the sources.
        CheckpointingException: the sources do not fit each other, or as for ``convert``.
    """
    from core.verbs.convert.run import run
    from core.verbs.merge.request import build_merge

    paths = _list_locations(sources)
    if not paths:
        raise UsageError("merge was called without sources", hint="pass at least one checkpoint")
    request = build_merge(
        paths,
        average=average,
        weights=weights,
        ema=ema,
        slerp=slerp,
        delta=delta,
        add_delta=_list_locations(add_delta),
        scale=scale,
        lora=None if lora is None else location_of(lora),
        replace=replace,
        keep_first=keep_first,
    )
    job = dataclasses.replace(_build_job(paths[0], dst, options), merge=request)
    return run(job, progress=bytes_only(progress))


@as_verb
def validate(
    path: AnyPath,
    *,
    headers: bool = False,
    deep: bool = False,
    iteration: int | None = None,
    plan_for: str | None = None,
    against: AnyPath | None = None,
    missing_chunks: str = "fill",
    rules: AnyPath | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Check one checkpoint for missing, damaged or inconsistent data, as ``ckpt validate`` does.

    Args:
        path: a checkpoint, or a training root.
        headers: also read small parts of every file.
        deep: also read every byte.
        iteration: which iteration of a training root.
        plan_for: also check whether it can be loaded at these sizes: ``tp=4,pp=2``.
        against: also compare the tensors with another checkpoint, or with a manifest.
        missing_chunks: treatment of zarr chunks that are not stored: ``fill`` or ``error``.
        rules: a TOML file with additional layout rules.
        threads: number of reading threads; None for one per processor.
        memory: memory limit for reading data, in bytes or as text: ``8GiB``.
        progress: called with (bytes read, bytes in total).

    Returns:
        The findings, the worst first; damage is a finding and raises nothing.

    Raises:
        UsageError: the path does not exist, or an option is invalid.
    """
    from core.verbs.checks.finding import Level
    from core.verbs.validate.run import validate as run_checks

    given = ["headers"] if headers else []
    refuse_without_effect(
        given, [NoEffect(("headers",), deep, "deep already includes the header checks")]
    )
    memory_bytes = _parse_memory(memory)
    rules_path = None if rules is None else parse_file(rules, option="--rules")
    check_values({"missing_chunks": missing_chunks, "threads": threads})
    request = None
    if plan_for is not None:
        from core.verbs.checks.plan_request import parse_plan_request

        request = parse_plan_request(plan_for, rules=rules_path, memory_bytes=memory_bytes)
    return run_checks(
        location_of(path),
        level=Level.DEEP if deep else Level.HEADERS if headers else Level.METADATA,
        iteration=iteration,
        rules=rules_path,
        threads=threads,
        memory_bytes=memory_bytes,
        progress=bytes_only(progress),
        plan_for=request,
        against=None if against is None else location_of(against),
        missing_chunks=missing_chunks,
    )


@as_verb
def diff(
    a: AnyPath,
    b: AnyPath,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    nan_differs: bool = False,
    stat_only: bool = False,
    read: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tensors_only: bool = False,
    optim: bool = True,
    strip_prefix: Sequence[str] = (),
    iteration: int | None = None,
    iteration_b: int | None = None,
    missing_chunks: str = "fill",
    rules: AnyPath | None = None,
    threads: int = DEFAULT_THREADS,
    memory: str | int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints tensor by tensor, across formats and layouts, as ``ckpt diff`` does.

    Args:
        a, b: the two checkpoints.
        rtol, atol: compare by value: equal if |A-B| <= atol + rtol·|B|; None for both compares bit
            for bit.
        nan_differs: when comparing by value, NaN is not equal to NaN.
        stat_only: compare names, shapes, dtypes and entries; read no tensor.
        read: read the tensors even if both manifests have fingerprints.
        include, exclude: globs of the keys to compare, or to skip.
        tensors_only: skip arguments, settings, counters and random states.
        optim: False excludes the optimizer's state and settings.
        strip_prefix: prefixes to remove from keys if more of them then match.
        iteration, iteration_b: iterations, where A and B are training roots.
        missing_chunks: treatment of zarr chunks that are not stored: ``fill`` or ``error``.
        rules: a TOML file with additional layout rules.
        threads: number of threads.
        memory: memory limit of the process, in bytes or as text: ``8GiB``.
        progress: called with (bytes done, bytes in total).

    Raises:
        UsageError: an option has no effect, or a pattern matches nothing.
        UnsupportedError: the two cannot be brought under the same names.
        CheckpointingException: one of the checkpoints cannot be read.
    """
    from core.verbs.diff.options import build_diff_job
    from core.verbs.diff.run import diff as compare

    check_values({"missing_chunks": missing_chunks, "threads": threads})
    job = build_diff_job(
        location_of(a),
        location_of(b),
        rtol=rtol,
        atol=atol,
        nan_differs=nan_differs,
        stat_only=stat_only,
        read=read,
        iteration_a=iteration,
        iteration_b=iteration_b,
        missing_chunks=missing_chunks,
        include=list_texts(include),
        exclude=list_texts(exclude),
        strip_prefix=list_texts(strip_prefix),
        with_optimizer=optim is not False,
        with_entries=not tensors_only,
        rules=None if rules is None else parse_file(rules, option="--rules"),
        threads=threads,
        memory_bytes=_parse_memory(memory),
    )
    return compare(job, progress=bytes_only(progress))


@as_verb
def prune(
    root: AnyPath,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    deep: bool = False,
    trust_metadata: bool = False,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | None = None,
) -> Pruning:
    """Remove iterations of a training root that are no longer needed, as ``ckpt prune`` does.

    It does not ask. The newest valid iteration, those that a tracker names, and what is not
    recognised as a complete checkpoint always stay.

    Args:
        root: the directory that contains the iterations, or its URL.
        keep_last: the number of the newest valid iterations that stay.
        keep_every: iterations divisible by this number stay, too.
        dry_run: only decide; nothing is removed.
        deep: read every byte of an iteration before it counts as valid.
        trust_metadata: remove iterations although the data of the newest valid one were not read.
        threads: number of reading threads; None for one per processor.
        memory: memory limit for reading data, in bytes or as text: ``8GiB``.
        progress: called with (bytes read, bytes in total) of what is validated.

    Returns:
        What was removed (with ``dry_run``: would be), and what stays and why.

    Raises:
        UsageError: neither ``keep_last`` nor ``keep_every`` is given, there are no iterations, or
            without ``deep`` and ``trust_metadata``, no manifest proves the newest valid one.
        CheckpointingException: a tracker is damaged, an iteration changed meanwhile, or the system
            refuses.
    """
    from core.verbs.checks.finding import Level
    from core.verbs.prune.decision import KeepRules
    from core.verbs.prune.run import PruneJob, examine, remove

    report = bytes_only(progress)
    job = PruneJob(
        root=location_of(root),
        rules=KeepRules(keep_last=keep_last, keep_every=keep_every),
        level=Level.DEEP if deep else Level.HEADERS,
        trusts_metadata=trust_metadata,
        threads=threads,
        memory_bytes=_parse_memory(memory),
    )
    pruning = examine(job, progress=report)
    if not dry_run:
        remove(pruning, progress=report)
    return pruning
