"""Show long pages through the user's pager, as git does.

``$CKPT_PAGER``, else ``$PAGER``, else ``less``; an empty value or ``cat`` is none. ``less`` gets
git's options in ``$LESS`` (F: leave if the page fits on the screen, R: keep colours, X: leave the
text on the screen) unless the user has options of their own there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from ckpt_cli.screen.terminal import columns_of

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NOT_STARTED = (126, 127)
"""Exit codes of the shell if it could not start a command."""


def pager_of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the shell command of the pager for a stream; None to print pages directly."""
    if not stream.isatty() or environ.get("TERM", "dumb") == "dumb":
        return None
    command = environ.get("CKPT_PAGER", environ.get("PAGER", "less")).strip()
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    # A command that begins with an assignment (LESS=S less) is left to the shell.
    is_known = bool(words) and ("=" in words[0] or shutil.which(words[0]) is not None)
    return command if is_known and words != ["cat"] else None


def print_page(lines: Iterable[str], pager: str | None) -> None:
    """Print a page to stdout, through the pager if the page is longer than the terminal.

    A pager that is left before the end of the page is no error.

    Args:
        pager: the pager's shell command; None prints each line as soon as it is known.
    """
    if pager is not None:
        lines = list(lines)
        if not _fits(lines) and _show(lines, pager):
            return
    for line in lines:
        print(line)


def _fits(lines: Sequence[str]) -> bool:
    """Return whether a page and the next prompt fit on the terminal, wrapped lines included."""
    size = shutil.get_terminal_size()
    columns = (columns_of(_ESCAPES.sub("", line)) for line in lines)
    return sum(max(-(-n // max(size.columns, 1)), 1) for n in columns) < size.lines


def _show(lines: Sequence[str], pager: str) -> bool:
    """Run the pager until the user leaves it; return False if it could not be started."""
    sys.stdout.flush()
    text = "".join(f"{line}\n" for line in lines)
    try:
        process = subprocess.Popen(
            pager,
            shell=True,
            stdin=subprocess.PIPE,
            env={"LESS": "FRX", "LV": "-c", **os.environ},
        )
    except OSError:
        return False
    with process, _without_interrupts():
        try:
            # A pipe that the pager closed is no error here.
            process.communicate(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
        except BaseException:
            process.terminate()
            raise
    return process.returncode not in _NOT_STARTED


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, which belongs to the pager while it runs; other threads ignore it anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
