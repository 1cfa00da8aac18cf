"""Runs a piece of work in a forked child that has little memory, little time and can open nothing.

For work on untrusted bytes by fast code that is not hardened against them, such as the C unpickler: whatever it does,
the caller gets the result or None, and then does the work the slow way. Linux only, because only there address space
can be limited relative to what the process has already mapped.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_HEADER_BYTES = 8
_WALL_FACTOR = 4
"""Seconds that the child may take for each second of its processor time, on a busy machine."""


def run_contained(
    work: Callable[[], bytes], *, memory_bytes: int, cpu_s: int, beside_threads: bool = False
) -> bytes | None:
    """The result of ``work()``, run in a child process, or None if it did not come to one.

    The child has closed every file, may open none, map at most ``memory_bytes`` more than this process has now, use
    ``cpu_s`` seconds of processor time, and ends without running exit handlers. Its failures (an exception, a crash, a
    limit) are None. It is gone when the function returns, also when that is by an exception.

    Args:
        work: sees the memory of this process as it is now; what it changes is lost.
        memory_bytes: address space for the work.
        cpu_s: seconds of processor time, >= 1.
        beside_threads: run it although other Python threads exist. A lock that one of them holds is never released
            in the child, so the work must take none (idle threads of native libraries do no harm).

    Returns:
        None also where containment is not possible: not on Linux, or other Python threads run.
    """
    if sys.platform != "linux" or (threading.active_count() != 1 and not beside_threads):
        return None
    try:
        limits = _limits(memory_bytes, cpu_s)
        reader, writer = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return None
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has reset the handlers
    pid = None
    try:
        pid = _fork()
        if pid == 0:
            _be_child(work, writer, limits)
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        closing, writer = writer, -1
        os.close(closing)
        received = None if pid is None else _received(reader, time.monotonic() + _WALL_FACTOR * cpu_s)
        if pid is not None and received is not None:
            _, status = os.waitpid(pid, 0)
            pid = None
            return received if status == 0 else None
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        for fd in (reader, writer):
            if fd >= 0:
                os.close(fd)
        if pid is not None:
            _end(pid)


def _limits(memory_bytes: int, cpu_s: int) -> dict[int, int]:
    """Hard limits for the child; address space is counted from what is mapped now."""
    import resource  # not on every platform

    with open("/proc/self/statm", "rb") as statm:
        n_pages = int(statm.read().split()[0])
    limits = {
        resource.RLIMIT_AS: n_pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        limits[kind] = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return limits


def _fork() -> int | None:
    """``os.fork``, or None if there can be no more processes."""
    with warnings.catch_warnings():  # Python 3.12 warns of any native thread, such as OpenBLAS's
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError:
            return None


def _end(pid: int) -> None:
    """Kills and reaps a child."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _received(reader: int, deadline: float) -> bytes | None:
    """The one message that comes through a pipe, or None if it is incomplete or late."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    parts = []
    n_bytes = 0
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        part = os.read(reader, 1 << 20)
        if not part:
            break
        parts.append(part)
        n_bytes += len(part)
    message = b"".join(parts)
    if n_bytes < _HEADER_BYTES or int.from_bytes(message[:_HEADER_BYTES], "little") != n_bytes - _HEADER_BYTES:
        return None
    return message[_HEADER_BYTES:]


def _be_child(work: Callable[[], bytes], writer: int, limits: dict[int, int]) -> NoReturn:
    """Does the work, sends its result and ends the process."""
    status = 1
    try:
        import resource

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        gc.disable()
        _close_all_but(writer)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        result = work()
        _send(writer, len(result).to_bytes(_HEADER_BYTES, "little"))
        _send(writer, result)
        status = 0
    finally:
        os._exit(status)


def _close_all_but(kept: int) -> None:
    """Closes every file, the standard streams included: what the child reports goes through the pipe only."""
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(0, kept)
    os.closerange(kept + 1, most if most > 0 else 1 << 20)


def _send(writer: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]
