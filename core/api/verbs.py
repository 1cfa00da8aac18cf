"""The verbs of the command line as functions: what ``core.convert(…)`` and its like call.

Each builds the job that its command would build, and runs it in this process. What is not an
argument here is a field of ``core.verbs.convert.job.Job``; ``core.verbs.convert.run.run`` runs such
a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import UsageError, did_you_mean
from core.files.remote_path import location_of
from core.progress import bytes_only
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES, Job, Report, TopologyChange

if TYPE_CHECKING:
    from core.engine.numbers.difference import Tolerance
    from core.verbs.diff.result import Diff
    from core.verbs.inspect.summary import Summary
    from core.verbs.prune.run import Pruning
    from core.verbs.validate.run import Validation

AnyPath = str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) of the step that the data goes through."""


def implied_format(dst: Path | None, names: str | None) -> str | None:
    """Return the target format that Hugging Face's names or the suffix of a file imply, or None."""
    if names is not None and names.startswith("hf"):
        return "hf"
    from core.formats.registry import format_of_suffix

    return None if dst is None else format_of_suffix(dst.suffix)


def inspect(path: AnyPath, *, iteration: int | None = None) -> Summary:
    """Read the metadata of a checkpoint and return what ``ckpt inspect`` shows.

    Raises:
        CheckpointingException: the path is not a checkpoint, or its metadata are damaged.
    """
    from core.opening.open import open_checkpoint
    from core.verbs.inspect.summary import summarize

    checkpoint = open_checkpoint(location_of(path), iteration=iteration)
    try:
        return summarize(checkpoint)
    finally:
        checkpoint.store.close()


def convert(
    src: AnyPath,
    dst: AnyPath | None = None,
    *,
    to: str | None = None,
    iteration: int | None = None,
    optimizer: bool | None = None,
    names: str | None = None,
    config: AnyPath | None = None,
    family: AnyPath | None = None,
    text_model: bool = False,
    tokenizer: AnyPath | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    verify: bool = False,
    force: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint in another format, as ``ckpt convert`` does; all or nothing.

    Args:
        src: a checkpoint of any format, or a training root.
        dst: the directory or file to write; None for a name in the directory of ``src``.
        to: the target format; None for the one that ``names`` or the suffix of ``dst`` implies
            (``.pt``, ``.safetensors``), or else that of the source.
        iteration: which iteration of a training root.
        optimizer: False excludes the optimizer's state; True insists on it; None carries it, except
            into a Hugging Face checkpoint, which has none.
        names: ``hf``, ``hf:MODEL_TYPE`` or ``megatron``: whose tensor names to write.
        config: a ``config.json``, for a source without one, or for what Megatron's arguments lack.
        family: a TOML file that describes a model family of your own, as ``--family`` does.
        text_model: take the text model out of a vision-language model and leave out all else.
        tokenizer: a directory whose tokenizer files are copied into a Hugging Face directory.
        dtype: cast all floating-point tensors of the model.
        include, exclude: globs of the keys to write, or to skip.
        rename: regular expression → replacement, applied to keys in this order.
        verify: read the result back and compare it with the source before it becomes visible.
        force: replace an existing destination, once the new one is complete.
        memory_bytes: memory limit of the process.
        progress: called with (bytes done, bytes in total) from the copying threads.

    Raises:
        CheckpointingException: the source is damaged, the destination cannot hold it, or an
            argument contradicts it. The destination is untouched.
    """
    from core.verbs.convert.run import run

    dst_path = None if dst is None else Path(dst)
    to = to or implied_format(dst_path, names)
    job = Job(
        src=location_of(src),
        dst=dst_path,
        to=to,
        iteration=iteration,
        keeps_layout=to is None,
        optim=None if optimizer is None else "carry" if optimizer else "drop",
        names=names,
        config=None if config is None else Path(config),
        family=None if family is None else Path(family),
        text_model=text_model,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        dtype=() if dtype is None else ((None, dtype),),
        include=tuple(include),
        exclude=tuple(exclude),
        rename=tuple((rename or {}).items()),
        verify=verify,
        force=force,
        memory_bytes=memory_bytes,
    )
    return run(job, progress=bytes_only(progress))


def reshard(
    src: AnyPath,
    dst: AnyPath | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    experts: str | None = None,
    to: str | None = None,
    iteration: int | None = None,
    optimizer: bool = True,
    verify: bool = False,
    force: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Write a Megatron checkpoint with other parallel sizes, as ``ckpt reshard`` does.

    Args:
        src: a Megatron checkpoint, or a training root.
        dst: the directory to write; None for a name in the directory of ``src``.
        tp, pp, vpp, ep, etp: sizes of the destination; None keeps that of the source.
        experts: module of the experts, ``sequential``, ``grouped`` or ``te-grouped``; None keeps
            it.
        to: the target format; None keeps that of the source.
        iteration, optimizer, verify, force, memory_bytes, progress: as for ``convert``.

    Raises:
        UsageError: neither a size nor ``experts`` is given, or the model cannot be divided so.
        CheckpointingException: as for ``convert``.
    """
    from core.verbs.convert.run import run

    topology = TopologyChange(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    if not topology.is_change and experts is None:
        raise UsageError("reshard: no target size", hint="give one, such as tp=2")
    job = Job(
        src=location_of(src),
        dst=None if dst is None else Path(dst),
        to=to,
        iteration=iteration,
        topology=topology,
        experts=experts,
        keeps_layout=True,
        optim="carry" if optimizer else "drop",
        verify=verify,
        force=force,
        memory_bytes=memory_bytes,
    )
    return run(job, progress=bytes_only(progress))


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
    to: str | None = None,
    names: str | None = None,
    dtype: str | None = None,
    verify: bool = False,
    force: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
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
        to, names, dtype, verify, force, memory_bytes, progress: as for ``convert``.

    Raises:
        UsageError: not exactly one computation is requested, or it does not suit the sources.
        CheckpointingException: the sources do not fit each other, or as for ``convert``.
    """
    from core.verbs.convert.run import run
    from core.verbs.merge.request import build_merge

    paths = [location_of(path) for path in sources]
    if not paths:
        raise UsageError("merge: no source", hint="give at least one checkpoint")
    request = build_merge(
        paths,
        average=average,
        weights=weights,
        ema=ema,
        slerp=slerp,
        delta=delta,
        add_delta=[location_of(path) for path in add_delta],
        scale=scale,
        lora=None if lora is None else location_of(lora),
        replace=replace,
        keep_first=keep_first,
    )
    dst_path = location_of(dst)
    to = to or implied_format(dst_path, names)
    job = Job(
        src=paths[0],
        dst=dst_path,
        to=to,
        keeps_layout=to is None,
        names=names,
        dtype=() if dtype is None else ((None, dtype),),
        verify=verify,
        force=force,
        memory_bytes=memory_bytes,
        merge=request,
    )
    return run(job, progress=bytes_only(progress))


def validate(
    path: AnyPath,
    *,
    level: str = "metadata",
    iteration: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Validation:
    """Check one checkpoint for missing, damaged or inconsistent data, as ``ckpt validate`` does.

    Args:
        path: a checkpoint, or a training root.
        level: ``metadata``, ``headers`` (also small parts of every file) or ``deep`` (every byte).
        iteration: which iteration of a training root.
        memory_bytes: memory limit for reading data.
        progress: called with (bytes read, bytes in total).

    Returns:
        The findings, the worst first; damage is a finding and raises nothing.

    Raises:
        UsageError: the path does not exist, or ``level`` has another value.
    """
    from core.verbs.checks.level import Level
    from core.verbs.validate.run import validate as run_checks

    levels = {item.name.lower(): item for item in Level}
    if level not in levels:
        raise UsageError(
            f"level={level!r} is none of: {', '.join(levels)}", hint=did_you_mean(level, levels)
        )
    return run_checks(
        location_of(path),
        level=levels[level],
        iteration=iteration,
        memory_bytes=memory_bytes,
        progress=bytes_only(progress),
    )


def diff(
    a: AnyPath,
    b: AnyPath,
    *,
    tolerance: Tolerance | None = None,
    optimizer: bool = True,
    entries: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints tensor by tensor, across formats and layouts, as ``ckpt diff`` does.

    Args:
        a, b: the two checkpoints.
        tolerance: the largest difference of values that counts as equal; None for exact equality.
        optimizer: False excludes the optimizer's state and settings.
        entries: False compares tensors only; otherwise also arguments, random states and the like.
        include, exclude: globs of the keys to compare, or to skip.
        memory_bytes: memory limit of the process.
        progress: called with (bytes done, bytes in total).

    Raises:
        UnsupportedError: the two cannot be brought under the same names.
        CheckpointingException: one of the checkpoints cannot be read.
    """
    from core.verbs.diff.run import DiffJob
    from core.verbs.diff.run import diff as compare

    job = DiffJob(
        a=location_of(a),
        b=location_of(b),
        rule=tolerance,
        with_optimizer=optimizer,
        with_entries=entries,
        include=tuple(include),
        exclude=tuple(exclude),
        memory_bytes=memory_bytes,
    )
    return compare(job, progress=bytes_only(progress))


def prune(
    root: AnyPath,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    deep: bool = False,
    trust_metadata: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Pruning:
    """Remove iterations of a training root that are not needed any more, as ``ckpt prune`` does.

    It does not ask. The newest valid iteration, those that a tracker names, and what is not
    recognised as a complete checkpoint always stay.

    Args:
        root: the directory that contains the iterations, or its URL.
        keep_last: the number of the newest valid iterations that stay.
        keep_every: iterations divisible by this number stay, too.
        dry_run: only decide; nothing is removed.
        deep: read every byte of an iteration before it counts as valid.
        trust_metadata: remove iterations although the data of the newest valid one were not read.
        memory_bytes: memory limit for reading data.
        progress: called with (bytes read, bytes in total) of what is validated.

    Returns:
        What was removed (with ``dry_run``: would be), and what stays for which reasons.

    Raises:
        UsageError: neither ``keep_last`` nor ``keep_every`` is given, there are no iterations, or
            without ``deep`` and ``trust_metadata``, no manifest proves the newest valid one.
        CheckpointingException: a tracker is damaged, an iteration changed meanwhile, or the system
            refuses.
    """
    from core.verbs.checks.level import Level
    from core.verbs.prune.decision import KeepRules
    from core.verbs.prune.run import PruneJob, examine, remove

    report = bytes_only(progress)
    job = PruneJob(
        root=location_of(root),
        rules=KeepRules(keep_last=keep_last, keep_every=keep_every),
        level=Level.DEEP if deep else Level.HEADERS,
        trusts_metadata=trust_metadata,
        memory_bytes=memory_bytes,
    )
    pruning = examine(job, progress=report)
    if not dry_run:
        remove(pruning, progress=report)
    return pruning
