"""``ckpt explore``: look around in a checkpoint, in the terminal.

The exit code is 0 when the user leaves, also if the checkpoint is damaged or a reading failed: the
screen shows that. It is that of the error if nothing can be opened, 2 if there is no terminal, and
4 if textual is not installed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from ckpt_cli.workers.current_team import default_memory
from core.errors import UsageError

if TYPE_CHECKING:
    from ckpt_cli.options.explore import ExploreOptions


def explore(options: ExploreOptions) -> int:
    """Run ``ckpt explore`` until the user leaves, and return the exit code.

    Raises:
        UsageError: there is no terminal for it, or the path does not exist.
        CheckpointingException: nothing of the checkpoint can be read.
    """
    require_terminal(options, (sys.stdin, sys.stdout, sys.stderr), os.environ)
    from ckpt_cli.explore.app import ExplorerApp
    from ckpt_cli.explore.source import SourceOptions
    from ckpt_cli.screen.failure import Terminated

    defaults = SourceOptions(path=options.path)
    app = ExplorerApp(
        SourceOptions(
            path=options.path,
            iteration=options.iteration,
            missing_chunks=options.missing_chunks or defaults.missing_chunks,
            threads=options.threads,
            memory_bytes=options.memory or default_memory(),
        )
    )
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.signal_number is not None:
        ended = Terminated(app.signal_number)
        ended.remaining = "explore writes nothing"
        raise ended
    return app.return_code or 0


def require_terminal(
    options: ExploreOptions, streams: tuple[TextIO, ...], environ: Mapping[str, str]
) -> None:
    """Raise unless the streams are a terminal that can draw a screen.

    Raises:
        UsageError: a stream is not a terminal, or ``TERM`` names one without a movable cursor.
    """
    path = shlex.quote(str(options.path))
    iteration = "" if options.iteration is None else f" --iteration {options.iteration}"
    hint = f"print the checkpoint instead: ckpt inspect {path}{iteration}"
    # textual reads keys from stdin and draws on stderr; results of a program are read from stdout.
    names = ("stdin", "stdout", "stderr")
    for name, stream in zip(names, streams, strict=True):
        if not stream.isatty():
            raise UsageError(
                f"ckpt explore needs a terminal, but {name} is not a terminal", hint=hint
            )
    terminal = environ.get("TERM", "")
    if terminal in ("", "dumb", "unknown"):
        raise UsageError(
            f"ckpt explore needs a terminal with cursor movement, but TERM is {terminal!r}",
            hint=hint,
        )
