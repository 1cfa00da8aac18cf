"""A worker does not outlive its launcher: one that was killed can end nobody, and what is left would keep the stage.

The agent starts each worker in a session of its own, so no signal of a terminal or of a batch system reaches the
workers once it is gone.
"""

from __future__ import annotations

import os
import signal
from threading import Thread
from time import sleep

_LOOK_S = 0.5
_END_S = 10.0
"""How long the worker may take to end by itself."""


def end_with(launcher: int) -> None:
    """Ends this process soon after its launcher has gone: as SIGTERM does, and by SIGKILL if that takes too long.

    Args:
        launcher: process id of the launcher, whose child this process is.
    """
    Thread(target=_watch, args=(launcher,), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(_END_S)
    os.kill(os.getpid(), signal.SIGKILL)
