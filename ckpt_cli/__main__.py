"""The program ``ckpt``; ``python -m ckpt_cli`` is the same.

Until the command line is read there is nothing to clean up: Ctrl-C then ends the process at once, without a traceback.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the process's command line; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ckpt_cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
