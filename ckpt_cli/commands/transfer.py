"""The part that ``convert`` and ``reshard`` share: job, dry run, progress and report.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.transfer/1", "dry_run": false,
     "src": str, "dst": str, "source_format": str, "format": str, "n_tensors": int,
     "bytes_read": int, "bytes_written": int, "bytes_resumed": int, "bytes_verified": int,
     "n_copies": int, "n_fingerprints": int, "n_read_back": int, "seconds": float,
     "files": [str], "manifest": str, "notes": [str], "dropped": [str],
     "dropped_reasons": [{"reason": str, "n_entries": int, "examples": [str]}], "next": str,
     "store": {"requests": int, "retries": int, "bytes": int}}

``store`` is present if a checkpoint is a URL: the requests that this process has sent, repeated
ones included, those of them that repeat one that failed, and the bytes of data received or sent by
requests that succeeded; it is that of the lead if several workers shared the work.

If several workers shared the work, ``"launch"`` contains the figures of each
(``ckpt_cli.workers.current_team``). With ``--dry-run`` the object is::

    {"schema": "ckpt.plan/1", "dry_run": true,
     "src": str, "source_format": str, "dst": str, "target_format": str,
     "n_tensors": int, "n_fragments": int,
     "read_bytes": int, "least_read_bytes": int, "write_bytes": int, "memory_bytes": int,
     "free_bytes": int | null, "dst_exists": bool, "resumed_bytes": int,
     "expected_seconds": float | null,
     "read_rate": int | null, "write_rate": int | null,
     "files": [{"path": str, "bytes": int}], "renamed": [{"old": str, "new": str}],
     "notes": [str], "dropped": [str],
     "dropped_reasons": [{"reason": str, "n_entries": int, "examples": [str]}],
     "rank": {"number": int, "files": [str]}}

and with ``--explain``::

    {"schema": "ckpt.explain/1", "src": str, "target_format": str,
     "tensors": [{"names": str, "n_tensors": int, "shape": [int],
                  "rule": str, "cut": str, "shard_shape": [int], "optimizer_states": [str],
                  "pattern": str, "where": str, "source": str}],
     "maps": [{"key": str, "source": MAP, "target": MAP,
               "moves": [{"source": int, "target": int, "bytes": int}]}]}

``maps`` is present with ``--map``, and ``tensors`` is empty then. MAP is that of ``ckpt inspect
--map`` (``ckpt_cli.commands.inspect``); ``source`` and ``target`` of a move number the boxes of the
two maps from 0. ``files`` are relative to ``dst``; ``rank`` is present with ``--rank`` and lists
files of the source. ``read_rate`` and ``write_rate`` are measured, in bytes per second, and
``expected_seconds`` is that of one process; they are null where nothing could be measured.
``resumed_bytes`` is what an interrupted run has written already. With too little free space (exit
code 7) the object is that of an error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ckpt_cli.host.results import RESULTS_VARIABLE
from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.pages.transfer import explain_lines, plan_blocks, plan_move_blocks, report_blocks
from ckpt_cli.screen.blocks import draw_text
from ckpt_cli.screen.failure import Terminated
from ckpt_cli.screen.terminal import print_note, screen_of
from ckpt_cli.workers.current_team import default_memory, device, launch_of, team, worker_threads
from ckpt_cli.workers.progress import show_progress
from ckpt_cli.workers.published import finish_published, recall_report, remember_report
from ckpt_cli.workers.remaining import InterruptedOutput
from ckpt_cli.workers.work_state import traffic_fields
from core.engine.team.protocol import broadcast_result, gather_results, is_lead
from core.errors import NoEffect, ReplicaMismatchError, UsageError, refuse_without_effect
from core.files.remote_path import location_of
from core.progress import Phase, Progress
from core.values import changed_fields
from core.verbs.convert.job import SIZES
from core.verbs.convert.job_options import OPTIONS, parse_job
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_cli.options.transfer import TransferOptions
    from core.engine.team.protocol import Team
    from core.verbs.convert.job import Report
    from core.verbs.convert.prepared import Prepared
    from core.verbs.convert.report.dropped import DroppedReason
    from core.verbs.forecast.forecast import Forecast


def build_job(options: TransferOptions, *, is_reshard: bool = False) -> Job:
    """Return the job that the options describe.

    Args:
        is_reshard: as in ``Job``.

    Raises:
        UsageError: the options contradict each other, or a value is invalid.
    """
    _check_conflicts(options)
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    switches = [name for name, value in values.items() if name.startswith("no_") and value]
    values |= dict.fromkeys((name.removeprefix("no_") for name in switches), False)
    values["memory"] = options.memory or default_memory()
    values["threads"] = options.threads or worker_threads()
    job_options = {name: values.get(name) for name in (*OPTIONS, *SIZES)}
    dst = options.output or options.dst
    job = parse_job(options.src, dst, job_options, is_reshard=is_reshard)
    return replace(job, device=device())


def _check_conflicts(options: TransferOptions) -> None:
    """Raise if options contradict each other or the rules file does not exist.

    Raises:
        UsageError: two options cannot be combined, or the path of ``--rules`` is not a file.
    """
    refuse_without_effect(
        changed_fields(options),
        (
            NoEffect(
                ("rank", "report"),
                not options.dry_run,
                "only --dry-run reports a plan",
                "add --dry-run",
            ),
            NoEffect(
                ("map",), not options.explain, "only --explain draws tensors", "add --explain"
            ),
        ),
    )
    if options.report is not None:
        from ckpt_cli.html_report.page import check_html_path

        check_html_path(options.report)
    if options.dst is not None and options.output not in (None, options.dst):
        raise UsageError(
            f"there are two destinations: {options.dst} and -o {options.output}",
            hint="pass only one destination",
        )
    conflicts = (
        ("--explain and --dry-run", options.explain and options.dry_run),
        ("--explain and --quiet", options.explain and options.quiet),
    )
    for pair, are_given in conflicts:
        if are_given:
            raise UsageError(f"{pair} cannot be combined", hint="use only one of the two")


def transfer(job: Job, options: TransferOptions) -> int:
    """Run, plan or explain the job, print the result on the lead, and return the exit code.

    Raises:
        CheckpointingException: the job cannot be done.
        KeyboardInterrupt: a signal ended the job.
    """
    workers = team()
    # A plan or an explanation copies no tensor data, so the lead works alone.
    if options.explain:
        return broadcast_result(workers, lambda: _explain(job, options))
    if options.dry_run:
        return broadcast_result(workers, lambda: _plan(job, options))
    # All workers do the work; the lead prints the report.
    report = _run(job, workers, options)
    if not is_lead(workers):
        return 0
    if options.json:
        fields = {"schema": "ckpt.transfer/1", "dry_run": False, **report.as_dict()}
        fields |= traffic_fields((report.src, report.dst))
        print(json.dumps(fields | launch_of(report.workers)))
    elif options.quiet:
        _note_dropped(report.dropped_reasons)
    else:
        blocks = report_blocks(report, is_proposed=job.dst is None)
        for line in draw_text(screen_of(sys.stdout), blocks):
            print(line)
    return 0


def _explain(job: Job, options: TransferOptions) -> int:
    """Print the layout rule of each tensor, or the maps of some, and return the exit code.

    Raises:
        UsageError: ``--map`` selects no tensor, or the job uses no layout rules.
    """
    from ckpt_cli.pages.pictures.shard_moves import move_json
    from core.verbs.pictures.shards import planned_keys, shard_move

    with _prepare(job, options) as prepared:
        header = {"src": str(prepared.source.path), "target_format": prepared.target_format.name}
        if options.map is not None:
            plan = prepared.plan
            keys = planned_keys(plan, options.map)
            if options.json:
                maps = [move_json(shard_move(plan, key)) for key in keys]
                fields = {"schema": "ckpt.explain/1", **header, "tensors": [], "maps": maps}
                print(json.dumps(fields))
                return 0
            for text in draw_text(screen_of(sys.stdout), plan_move_blocks(plan, keys)):
                print(text)
            return 0
        lines = prepared.explain_layout()
        if options.json:
            tensors = [line.as_dict() for line in lines]
            print(json.dumps({"schema": "ckpt.explain/1", **header, "tensors": tensors}))
        else:
            for text in explain_lines(screen_of(sys.stdout), lines):
                print(text)
    return 0


def _plan(job: Job, options: TransferOptions) -> int:
    """Print what the job would read and write, and return the exit code.

    Raises:
        CapacityError: the job needs more space than is free; the plan has been printed as text.
    """
    from core.verbs.forecast.forecast import forecast

    begun = time.monotonic()
    with _prepare(job, options) as prepared:
        expected = forecast(prepared, prepare_seconds=time.monotonic() - begun)
        files = None if options.rank is None else prepared.files_for_rank(options.rank)
        if options.report is not None:
            from ckpt_cli.html_report.page import write_report
            from ckpt_cli.html_report.transfer_report import plan_html

            verb = "reshard" if job.is_reshard else "convert"
            verb = verb if job.merge is None else "merge"
            html = plan_html(prepared, expected, verb=verb)
            write_report(options.report, html, is_quiet=options.quiet)
        if options.json:
            if expected.shortage is not None:
                raise expected.shortage
            plan = prepared.as_dict() | expected.as_dict()
            if files is not None:
                plan["rank"] = {"number": options.rank, "files": files}
            print(json.dumps({"schema": "ckpt.plan/1", "dry_run": True, **plan}))
        elif options.quiet:
            _note_dropped(prepared.dropped_reasons)
        else:
            command = _command_without_dry_run(options, expected)
            blocks = plan_blocks(
                prepared, expected, rank=options.rank, rank_files=files, command=command
            )
            for line in draw_text(screen_of(sys.stdout), blocks):
                print(line)
        if expected.shortage is not None:
            raise expected.shortage
    return 0


def _command_without_dry_run(options: TransferOptions, expected: Forecast) -> str | None:
    """Return the command line that does what was planned; None if the run would refuse it.

    Args:
        expected: tells what exists at the destination.
    """
    if _command_again(options) is None:
        return None
    # Nobody should paste a --force that he has not asked for.
    existing = expected.existing
    if existing is not None and (existing.refusal is not None or not options.force):
        return None
    words = list(options.words)
    for at in reversed(range(len(words))):
        name = words[at].replace("_", "-")
        if name in ("--dry-run", "-n") or name.startswith(("--rank=", "--report=")):
            del words[at]
        elif name in ("--rank", "--report"):
            del words[at : at + 2]
    return shlex.join(words)


def _command_again(options: TransferOptions) -> str | None:
    """Return the command line to paste; None if it is not known, or may hold secrets."""
    # Below ``launch``, the words are only those of the inner command.
    if not options.words or RESULTS_VARIABLE in os.environ or options.storage_option:
        return None
    return shlex.join(options.words)


def _form_of(options: TransferOptions) -> str:
    """Return the form in which progress is shown."""
    return progress_form(options.progress, is_quiet=options.quiet)


@contextmanager
def _prepare(job: Job, options: TransferOptions) -> Iterator[Prepared]:
    """Prepare the job, and show the progress of that."""
    with ExitStack() as stack:
        with show_progress(_form_of(options)) as progress:
            prepared = stack.enter_context(prepare(job, progress=progress))
        yield prepared


def _run(job: Job, workers: Team, options: TransferOptions) -> Report:
    """Run the job, in this process alone or together with the other workers.

    Raises:
        UsageError: the two tensors of ``--tie`` are not identical.
        KeyboardInterrupt: a signal ended the job.
        CheckpointingException: the job cannot be done.
    """
    # Every launch keeps its staging directory, even with one worker, so a restart can continue.
    is_launched = RESULTS_VARIABLE in os.environ
    job = replace(job, resume=job.resume or is_launched)
    destination = InterruptedOutput(
        job.dst, keeps_partial=job.resume or workers.size > 1, command=_command_again(options)
    )

    def note_publication(report: Report, inode: int) -> None:
        destination.path, destination.inode = location_of(report.dst), inode
        remember_report(report, inode)

    try:
        with show_progress(_form_of(options)) as shown:

            def progress(step: Progress) -> None:
                # The stage is opened for the copy: what exists until then is another run's.
                destination.has_begun |= step.phase is Phase.COPYING
                if shown is not None:
                    shown(step)

            report = _published_report(workers)
            if report is not None:
                return report
            if workers.size == 1:
                return run(job, progress=progress, publishing=note_publication)
            # A process that works alone need not load this module.
            from core.verbs.convert.workers.run import run_shared

            return run_shared(job, workers, progress=progress, publishing=note_publication)
    except ReplicaMismatchError as err:
        # The tensors of --tie are compared as replicas of one: name the option, not the replicas.
        alias = next((alias for alias, original in job.tie if original == err.key), None)
        if alias is None:
            raise
        message = f"--tie cannot drop {alias!r}, which differs from {err.key!r}: {err.message}"
        raise UsageError(message, hint="omit --tie, because both tensors are needed") from err
    except Terminated as err:
        err.remaining = destination.remaining()
        raise


def _published_report(workers: Team) -> Report | None:
    """Return the report of an earlier attempt of this launch that published its destination.

    Such an attempt failed after its last step; there is nothing left to convert. Every worker looks
    for the report, because the lead of that attempt may have been on another host.

    Returns:
        None if no attempt got that far.
    """
    reports = gather_results(workers, recall_report) or ()
    report = next((report for report in reports if report is not None), None)
    return broadcast_result(workers, lambda: None if report is None else finish_published(report))


def _note_dropped(reasons: Sequence[DroppedReason]) -> None:
    """Print a note on what is not carried; even ``--quiet`` does not suppress this."""
    if reasons:
        print_note(f"not carried: {', '.join(map(str, reasons))}")
