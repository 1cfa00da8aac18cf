"""Ends a worker whose launcher has been killed; otherwise it would go on and keep the stage.

The agent starts each worker in a session of its own, so no signal of a terminal or of a batch
system reaches the workers once the agent is gone.
"""

from __future__ import annotations

import os
import signal
from threading import Thread
from time import sleep

_POLL_S = 0.5
_END_S = 10.0
"""How long the worker may take to clean up and exit after SIGTERM."""


def end_with(launcher: int) -> None:
    """Start a thread that ends this process after its launcher: by SIGTERM, then by SIGKILL if that
    takes too long.

    Args:
        launcher: process id of the launcher, the parent of this process.
    """
    Thread(target=_watch, args=(launcher,), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(_END_S)
    os.kill(os.getpid(), signal.SIGKILL)
