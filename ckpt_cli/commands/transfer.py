"""What ``convert`` and ``reshard`` share: the job, the dry run, the progress, and the report at the end.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.transfer/1", "dry_run": false, "src": str, "dst": str, "source_format": str, "format": str,
     "n_tensors": int, "bytes_read": int, "bytes_written": int, "bytes_resumed": int, "bytes_verified": int,
     "n_copies": int, "n_fingerprints": int, "n_read_back": int, "seconds": float, "files": [str], "manifest": str,
     "notes": [str], "dropped": [str]}

of several workers also ``"launch"``, what each did (``ckpt_cli.workers.current_team``); and with ``--dry-run``::

    {"schema": "ckpt.plan/1", "dry_run": true, "src": str, "source_format": str, "dst": str, "target_format": str,
     "n_tensors": int, "n_fragments": int, "read_bytes": int, "least_read_bytes": int, "write_bytes": int,
     "memory_bytes": int, "files": [{"path": str, "bytes": int}], "renamed": [{"old": str, "new": str}], "notes": [str],
     "dropped": [str], "rank": {"number": int, "files": [str]}}

and with ``--explain``::

    {"schema": "ckpt.explain/1", "src": str, "target_format": str, "tensors": [{"names": str, "n_tensors": int,
     "shape": [int], "rule": str, "cut": str, "shard_shape": [int], "optimizer_states": [str], "pattern": str,
     "where": str, "source": str}]}

``files`` are relative to ``dst``; ``rank`` is there with ``--rank``, its files are the source's.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.host.results import RESULTS_VARIABLE
from ckpt_cli.options.values import (
    casts_of,
    check_rules,
    names_of,
    pairs_of,
    quantizations_of,
    renames_of,
    size_in_bytes,
    stacks_of,
)
from ckpt_cli.pages.transfer import explain_lines, plan_lines, report_lines
from ckpt_cli.screen.terminal import say_note, screen_of
from ckpt_cli.workers.current_team import device, launch_of, team, worker_threads
from ckpt_cli.workers.progress import progress_bar
from ckpt_cli.workers.published import recalled, remember, tidied
from core.convert.prepare import prepare
from core.convert.run import Job, TopologyChange, run
from core.errors import ReplicaMismatchError, UsageError
from core.megatron.model.pipeline import Pipeline, parse_layout
from core.megatron.model.version import parse_version
from core.team.protocol import collected, is_lead, told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_cli.options.transfer import TransferOptions
    from core.convert.job import Progress, Report
    from core.team.protocol import Team

SIZES = ("tp", "pp", "vpp", "ep", "etp")
"""Parallel sizes as the options name them."""


def job_of(options: TransferOptions, *, keeps_layout: bool) -> Job:
    """The engine's job for some options.

    Args:
        keeps_layout: parallel sizes that are not given stay the source's; otherwise they become 1.

    Raises:
        UsageError: the options contradict one another.
    """
    if options.dst is not None and options.output is not None and options.dst != options.output:
        raise UsageError(f"two destinations: {options.dst} and -o {options.output}", hint="give one")
    if options.rank is not None and not options.dry_run:
        raise UsageError("--rank lists what one rank needs; it goes with --dry-run")
    check_rules(options.rules)
    if options.explain and (options.dry_run or options.quiet):
        raise UsageError(
            f"--explain and {'--dry-run' if options.dry_run else '--quiet'} exclude each other", hint="give one"
        )
    if options.keep_padded_vocab and options.vocab_size is not None:
        raise UsageError("--keep-padded-vocab and --vocab-size contradict each other", hint="give one")
    if options.stack_layers and options.unstack_layers:
        raise UsageError("--stack-layers and --unstack-layers contradict each other", hint="give one")
    new = {name: getattr(options, f"{name}_new") for name in SIZES}
    asserted = {name: size for name in SIZES if (size := getattr(options, name)) is not None}
    pipeline = pipeline_of(options)
    topology = None
    if asserted or pipeline is not None or any(size is not None for size in new.values()):
        topology = TopologyChange(**new, pipeline=pipeline, source=asserted)
    defaults = Job(src=options.src)
    return Job(
        src=options.src,
        dst=options.output or options.dst,
        to=options.to,
        iteration=options.iteration,
        topology=topology,
        keeps_layout=keeps_layout,
        vocab_size=options.vocab_size,
        vocab_divisor=options.vocab_divisor,
        keep_padded_vocab=options.keep_padded_vocab,
        optim="drop" if options.no_optim else "carry",
        rng=options.rng,
        missing_chunks=options.missing_chunks or defaults.missing_chunks,
        replicas=options.replicas or defaults.replicas,
        names=names_of(options.names),
        config=options.config,
        transformer_impl=options.transformer_impl,
        megatron_version=None if options.megatron_version is None else parse_version(options.megatron_version),
        moe_experts=options.moe_experts,
        dequantize=options.dequantize,
        include=tuple(options.include or ()),
        exclude=tuple(options.exclude or ()),
        strip_prefix=tuple(options.strip_prefix or ()),
        add_prefix=options.add_prefix,
        rename=renames_of(options.rename),
        untie=pairs_of(options.untie, option="--untie"),
        tie=pairs_of(options.tie, option="--tie"),
        stack_layers=options.stack_layers,
        unstack_layers=stacks_of(options.unstack_layers),
        dtype=casts_of(options.dtype),
        quantize=quantizations_of(options.quantize),
        max_file_bytes=None if options.max_shard_size is None else size_in_bytes(options.max_shard_size),
        metadata_only=options.metadata_only,
        weights_only=options.weights_only,
        drop_unknown=options.drop_unknown,
        memory_bytes=defaults.memory_bytes if options.memory is None else size_in_bytes(options.memory),
        threads=options.threads or worker_threads() or defaults.threads,
        resume=options.resume,
        force=options.force,
        crc=not options.no_crc,
        digest=not options.no_digest,
        fsync=not options.no_fsync,
        fingerprint=options.fingerprint,
        verify=options.verify,
        rules=options.rules,
        unknown=options.unknown or "refuse",
        device=device(),
    )


def pipeline_of(options: TransferOptions) -> Pipeline | None:
    """How the options distribute layers over pipeline stages: those that are given say all of it; None without any.

    Raises:
        UsageError: they contradict one another, or the layout is none.
    """
    flags = (options.account_for_embedding, options.account_for_loss)
    counts = (options.decoder_first, options.decoder_last)
    if options.pipeline_layout is None and all(value is None for value in (*flags, *counts)):
        return None
    return Pipeline(
        first=options.decoder_first,
        last=options.decoder_last,
        counts_embedding=bool(options.account_for_embedding),
        counts_loss=bool(options.account_for_loss),
        layout=None if options.pipeline_layout is None else parse_layout(options.pipeline_layout),
    )


def transfer(job: Job, options: TransferOptions) -> int:
    """Runs or plans the job and tells about it; returns the exit code. Of several workers only the lead tells."""
    if options.explain:
        return told(team(), lambda: _explain(job, options))
    return told(team(), lambda: _plan(job, options)) if options.dry_run else _run(job, options)


def _explain(job: Job, options: TransferOptions) -> int:
    with prepare(job) as prepared:
        lines = prepared.explain_layout()
        if options.json:
            found = {"src": str(prepared.source.path), "target_format": prepared.target_format.name}
            tensors = [line.as_dict() for line in lines]
            print(json.dumps({"schema": "ckpt.explain/1", **found, "tensors": tensors}))
        else:
            for text in explain_lines(screen_of(sys.stdout), lines):
                print(text)
    return 0


def _plan(job: Job, options: TransferOptions) -> int:
    with prepare(job) as prepared:
        files = None if options.rank is None else prepared.files_for_rank(options.rank)
        if options.json:
            plan = prepared.as_dict()
            if files is not None:
                plan["rank"] = {"number": options.rank, "files": files}
            print(json.dumps({"schema": "ckpt.plan/1", "dry_run": True, **plan}))
        elif not options.quiet:
            for line in plan_lines(screen_of(sys.stdout), prepared, rank=options.rank, rank_files=files):
                print(line)
        else:
            _say_left(prepared.dropped)
    return 0


def _run(job: Job, options: TransferOptions) -> int:
    workers, job = team(), _kept(job)
    try:
        with progress_bar(is_wanted=not options.quiet) as progress:
            found = _published(workers)
            report = found or _done(job, workers, progress)
    except ReplicaMismatchError as err:
        gone = next((gone for gone, kept in job.tie if kept == err.key), None)
        if gone is None:
            raise
        message = f"--tie: {gone!r} does not equal {err.key!r}: {err.message}"
        raise UsageError(message, hint="leave --tie out; both are needed") from err
    except KeyboardInterrupt:
        if (job.resume or (workers.size > 1 and is_lead(workers))) and not os.environ.get(RESULTS_VARIABLE):
            say_note("what is done so far is kept; the same command goes on from there")
        raise
    if not is_lead(workers):
        return 0
    if options.json:
        answer = {"schema": "ckpt.transfer/1", "dry_run": False, **report.as_dict()}
        print(json.dumps(answer | launch_of(report.workers)))
    elif not options.quiet:
        for line in report_lines(screen_of(sys.stdout), report, is_proposed=job.dst is None):
            print(line)
    else:
        _say_left(report.dropped)
    return 0


def _done(job: Job, workers: Team, progress: Progress | None) -> Report:
    """Run the job, in this process or together with the other workers."""
    if workers.size == 1:
        return run(job, progress=progress, publishing=remember)
    from core.convert.workers.run import run_shared  # a process that works alone need not load it

    return run_shared(job, workers, publishing=remember)


def _published(workers: Team) -> Report | None:
    """What an earlier attempt of this launch has published; its lead may have been on another host."""
    found = next((one for one in collected(workers, recalled) or () if one is not None), None)
    return told(workers, lambda: None if found is None else tidied(found))


def _kept(job: Job) -> Job:
    """The job with a stage that is kept, as every launch keeps it, also that of one worker."""
    return replace(job, resume=True) if RESULTS_VARIABLE in os.environ else job


def _say_left(dropped: Sequence[str]) -> None:
    """What even ``--quiet`` does not keep to itself."""
    if dropped:
        say_note(f"not carried: {', '.join(dropped)}")
