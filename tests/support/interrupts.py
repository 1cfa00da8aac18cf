"""Interrupt the main thread at a certain point."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_GUARD_S = 20.0


def interrupt_in(waiting: Callable[..., object], *, after_s: float = 0.0) -> None:
    """Send SIGINT to the main thread as soon as it is in a function, or some seconds later."""
    main = threading.main_thread().ident
    give_up_at = time.monotonic() + _GUARD_S
    while time.monotonic() < give_up_at:
        frame = sys._current_frames().get(main or 0)
        while frame is not None:
            if frame.f_code is waiting.__code__:
                time.sleep(after_s)
                os.kill(os.getpid(), signal.SIGINT)
                return
            frame = frame.f_back
        time.sleep(0.001)
