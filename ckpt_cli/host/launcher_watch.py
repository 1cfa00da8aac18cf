"""A watch that ends a worker whose launcher has been killed.

The agent starts each worker in a session of its own, so after the agent is gone no signal from a
terminal or batch system reaches the workers. They would go on and keep the staging directory
locked.
"""

from __future__ import annotations

import os
import signal
from threading import Thread
from time import sleep

_POLL_S = 0.5
_END_S = 10.0
"""Seconds that the worker may take to clean up and exit after SIGTERM."""


def end_with(launcher: int) -> None:
    """Start a thread that ends this process after its launcher has ended.

    The process gets SIGTERM, and SIGKILL if it does not exit in time.

    Args:
        launcher: process id of the launcher, the parent of this process.
    """
    Thread(target=_watch, args=(launcher,), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    """Wait until the launcher has ended, then end this process."""
    # The system gives the children of a dead process another parent.
    while os.getppid() == launcher:
        sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(_END_S)
    os.kill(os.getpid(), signal.SIGKILL)
