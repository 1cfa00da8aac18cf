"""The program ``ckpt``, also run by ``python -m ckpt_cli``.

Until the command line is parsed there is nothing to clean up, so Ctrl-C ends the process at once
and without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ckpt_cli.app import main as run
        from core.files.requests.ending import n_unanswered
    except ModuleNotFoundError as err:
        # Without these packages there is no command line at all; packages that single commands need
        # are reported when the commands run.
        if err.name not in ("typer", "typing_extensions"):
            raise
        print(f"error: ckpt needs {err.name}: pip install {err.name}", file=sys.stderr)
        return 4
    if "_CKPT_COMPLETE" in os.environ:
        _complete()
    exit_code = run()
    # A request that was given up may still block in native code, which must not find the
    # interpreter gone when the answer comes.
    if n_unanswered():
        _exit_at_once(exit_code)
    return exit_code


def _exit_at_once(exit_code: int) -> NoReturn:
    """End the process without the interpreter's own cleaning up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _complete() -> NoReturn:
    """Answer the shell, which completes a command line, and end at once."""
    # Nothing may appear in the user's line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    from typer.main import get_command

    from ckpt_cli.app import app
    from ckpt_cli.completion.answer import answer

    reply = answer(get_command(app), os.environ)
    try:
        sys.stdout.write(reply.text)
        sys.stdout.flush()
    finally:
        os._exit(reply.exit_code)


if __name__ == "__main__":
    sys.exit(main())
