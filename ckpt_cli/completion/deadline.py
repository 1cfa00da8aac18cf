"""Compute something in a child process, for which nobody waits when time is over.

A thread would not do: one that waits for a network mount, or holds the interpreter's lock while it
parses a large file, keeps its process from ending. The child has no stream of this process, so a
shell that waits for the end of the output does not wait for the child. The child goes on for a few
seconds, so that it can store what it finds for the next time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

DEFAULT_S = 0.3
"""Seconds after the start of the process when nobody waits for an answer any more."""
_LEAST_S = 0.1
"""Seconds for the answer where the start has taken all the time: enough for what is remembered."""
TIMEOUT_VARIABLE = "CKPT_COMPLETION_TIMEOUT"
"""Environment variable that replaces ``DEFAULT_S``."""
_LONGEST_S = 10
"""Seconds after which the child is killed."""


def remaining_s(environ: Mapping[str, str]) -> float:
    """Return the seconds until the answer is due, counted from the start of this process."""
    try:
        limit_s = float(environ.get(TIMEOUT_VARIABLE, ""))
    except ValueError:
        limit_s = DEFAULT_S
    return max(limit_s - _age_s(), _LEAST_S)


def _age_s() -> float:
    """Return the age of this process; where the system does not tell, its processor time."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            # The name, in parentheses, may contain spaces; field 22 is the start since the boot.
            start = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


def run_within(compute: Callable[[], Any], *, seconds: float) -> Any:
    """Run a function in a child process and return its result.

    Args:
        compute: returns something that JSON can hold; what it prints is lost.
        seconds: how long to wait for the result.

    Returns:
        None if time is over, or if the function raises or crashes.
    """
    deadline = time.monotonic() + seconds
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(compute, writing)
    os.close(writing)
    message = bytearray()
    try:
        # The message is complete when the child has closed the pipe.
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                return json.loads(message)
            message += part
    except ValueError:  # the child ended early
        pass
    finally:
        os.close(reading)
    return None


def _be_child(compute: Callable[[], Any], writing: int) -> NoReturn:
    """Write the result of a function to the pipe, and end."""
    try:
        # In the background, out of reach of Ctrl-C, and for a limited time.
        os.setsid()
        os.nice(5)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LONGEST_S)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        data = memoryview(json.dumps(compute()).encode())
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)
