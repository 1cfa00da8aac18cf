"""What tests run in the sandbox: its child imports these by their names, without site-packages."""

from __future__ import annotations

import os
import signal
import sys
import time

MIB = 1 << 20


def echo(data: bytes) -> bytes:
    return data


def fail(data: bytes) -> bytes:
    return bytes(1 // 0)


def crash(data: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b"still here"


def leave(data: bytes) -> bytes:
    sys.exit(0)


def leave_at_once(data: bytes) -> bytes:
    os._exit(0)


def take_300_mib(data: bytes) -> bytes:
    return bytes(len(bytearray(300 * MIB)) & 1)


def take_100_mib(data: bytes) -> bytes:
    return b"x" * (len(bytearray(100 * MIB)) & 1)


def spin(data: bytes) -> bytes:
    while True:
        pass


def wait(data: bytes) -> bytes:
    time.sleep(600)
    return b""


def interrupt_the_parent(data: bytes) -> bytes:
    os.kill(os.getppid(), signal.SIGINT)
    return wait(data)


def try_to_open(data: bytes) -> bytes:
    """Open a file whose path is ``data``, write to the other standard streams, and make a pipe."""
    outcomes = []
    for attempt in (
        lambda: os.open(data, os.O_CREAT | os.O_WRONLY),
        lambda: os.read(0, 1),
        lambda: os.write(2, b"x"),
        lambda: os.pipe(),
    ):
        try:
            attempt()
            outcomes.append("done")
        except OSError:
            outcomes.append("refused")
    return " ".join(outcomes).encode()


def open_files(data: bytes) -> bytes:
    """Return the numbers of the descriptors that are open."""
    numbers = []
    for number in range(100):
        try:
            os.fstat(number)
            numbers.append(number)
        except OSError:
            pass
    return repr(numbers).encode()


def modules_of_others(data: bytes) -> bytes:
    """Return the modules that lie in neither the standard library nor this project."""
    top = {name.partition(".")[0] for name in sys.modules}
    return " ".join(sorted(top - sys.stdlib_module_names - {"__main__", "core", "tests"})).encode()
