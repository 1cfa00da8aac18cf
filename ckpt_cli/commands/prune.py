"""``ckpt prune ROOT``: remove old iterations of a training run.

The decision is shown first. On a terminal the command asks, elsewhere it needs ``--yes``. The exit
code is 1 if no iteration is valid; then nothing is removed.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.prune/1", "path": str, "is_dry_run": bool, "level": str,
     "keep_last": int | null, "keep_every": int | null, "newest_valid": int | null,
     "kept": [{"iteration": int, "paths": [str], "why": [str], "n_files": int, "n_bytes": int}],
     "removed": [{"iteration": int, "paths": [str], "why": [str], "n_files": int,
                  "n_bytes": int}],
     "unfinished": [str], "freed_bytes": int, "is_proven": bool, "notes": [str],
     "seconds": float}

"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.pages.prune_page import prune_blocks, prune_json
from ckpt_cli.screen.blocks import bytes_text, draw_text, n_text
from ckpt_cli.screen.failure import Terminated
from ckpt_cli.screen.terminal import screen_of
from ckpt_cli.workers.current_team import default_memory
from ckpt_cli.workers.progress import show_progress
from core.errors import UsageError
from core.verbs.checks.finding import Level
from core.verbs.prune.decision import KeepRules
from core.verbs.prune.run import PruneJob, Pruning, examine, remove

if TYPE_CHECKING:
    from ckpt_cli.options.prune import PruneOptions


def prune(options: PruneOptions) -> int:
    """Run ``ckpt prune`` and return the exit code.

    Raises:
        UsageError: there is no rule, no terminal to ask on, the root has no iterations, or what
            would stay was not read.
        CheckpointingException: the root cannot be examined, or an iteration cannot be removed.
    """
    begun = time.monotonic()
    job = PruneJob(
        root=options.root,
        rules=KeepRules(keep_last=options.keep_last, keep_every=options.keep_every),
        level=Level.DEEP if options.deep else Level.HEADERS,
        trusts_metadata=options.trust_metadata,
        threads=options.threads,
        memory_bytes=options.memory or default_memory(),
    )
    form = progress_form(options.progress, is_quiet=options.quiet)
    with _remaining("nothing was removed"), show_progress(form) as progress:
        pruning = examine(job, progress=progress)
    has_work = bool(pruning.removed or pruning.unfinished) and not options.dry_run
    if has_work:
        _check_asking(options)
        pruning.require_proven()
    if has_work and not options.yes:
        with _remaining("nothing was removed"):
            for line in draw_text(screen_of(sys.stdout), prune_blocks(pruning, is_done=False)):
                print(line)
            has_work = _is_confirmed(pruning)
        if not has_work:
            print("nothing was removed")
            return 0
    if has_work:
        remaining = "some iterations were removed; run the same command again to remove the rest"
        with _remaining(remaining), show_progress(form) as progress:
            remove(pruning, progress=progress)
    # The report, after the removal.
    if options.json:
        rules = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        report: dict[str, object] = {"is_dry_run": options.dry_run, "level": LEVELS[job.level]}
        report |= rules | prune_json(pruning) | {"seconds": time.monotonic() - begun}
        print(json.dumps({"schema": "ckpt.prune/1"} | report))
    elif not options.quiet:
        lines = list(draw_text(screen_of(sys.stdout), prune_blocks(pruning, is_done=has_work)))
        # On a terminal, the table has been shown before the question.
        for line in lines if options.yes or not has_work else lines[-1:]:
            print(line)
    if pruning.newest_valid is None and pruning.iterations:
        print("error: no iteration is known to be valid, so none was removed", file=sys.stderr)
        return 1
    return 0


def _check_asking(options: PruneOptions) -> None:
    """Raise unless the command need not ask, or can.

    Raises:
        UsageError: there is no terminal.
    """
    if options.yes:
        return
    if options.json or options.quiet or not sys.stdin.isatty():
        why = "stdin is not a terminal"
        if sys.stdin.isatty():
            why = f"{'--json' if options.json else '--quiet'} disables the prompt"
        raise UsageError(
            f"removing iterations requires confirmation, but {why}",
            hint="review the plan with --dry-run, then pass --yes",
        )


def _is_confirmed(pruning: Pruning) -> bool:
    """Ask on stderr whether to remove the iterations; everything but "y" and "yes" means no."""
    count = n_text(len(pruning.removed), "iteration")
    question = f"Remove {count} ({bytes_text(pruning.freed_bytes)})? [y/N] "
    if not pruning.removed:
        question = "Finish the interrupted removal? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except Terminated:
        print(file=sys.stderr)  # the message does not belong on the line of the question
        raise


@contextmanager
def _remaining(text: str) -> Iterator[None]:
    """Tell a user who interrupts the block what remains."""
    try:
        yield
    except Terminated as err:
        err.remaining = text
        raise
