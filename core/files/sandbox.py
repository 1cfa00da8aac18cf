"""Run a function on untrusted bytes in a process with limited memory and time and without files.

For fast code that is not hardened against hostile files, such as the C unpickler: whatever it does,
the caller gets the result or None, and in the latter case uses slower code. Linux only, because
only there address space can be limited relative to what the process has already mapped.

The child is a new interpreter, not a fork: a fork of a process that runs threads may wait forever
for a lock that one of them held. A call costs about 25 ms, plus the function's imports: 60 to
100 ms for DCP metadata.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

_HEADER_BYTES = 8
_WALL_FACTOR = 4
"""Wall-clock seconds that the child may take per second of processor time, on a busy machine."""

_PROGRAM = "; ".join(
    (
        "import sys",
        "sys.path.insert(0, sys.argv[1])",
        "from core.files.sandbox import be_child",
        "be_child(sys.argv[2:])",
    )
)


def run_sandboxed(function: str, data: bytes, *, memory_bytes: int, cpu_s: int) -> bytes | None:
    """Run a function on untrusted bytes in a confined child process and return its result.

    The child imports the function's module and reads ``data``. After that only the pipe for its
    result is open; it cannot open files, map more than ``memory_bytes`` in addition, or use more
    than ``cpu_s`` seconds of processor time. When this function returns or raises, the child has
    ended.

    Args:
        function: ``package.module:function`` of this project, from bytes to bytes.
        memory_bytes: address space for the function, in addition to its module and ``data``.
        cpu_s: seconds of processor time, >= 1.

    Returns:
        The function's result. None if it raised, crashed or hit a limit, and also if there is no
        such confinement: not on Linux, or no more processes can be started.
    """
    if sys.platform != "linux" or not sys.executable:
        return None

    # -I: neither the working directory nor the environment affects the imports.
    # -S: no installed package can be imported.
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _PROGRAM,
        str(root),
        function,
        str(memory_bytes),
        str(cpu_s),
    ]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    except OSError:
        return None

    # The message is the length of the result, then the result. The child is killed in any case,
    # even if this process is interrupted.
    try:
        message, _ = child.communicate(data, timeout=_WALL_FACTOR * cpu_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    # A child that was stopped while writing has sent fewer bytes than it announced.
    if (
        child.returncode != 0
        or int.from_bytes(message[:_HEADER_BYTES], "little") != len(message) - _HEADER_BYTES
    ):
        return None
    return message[_HEADER_BYTES:]


def be_child(arguments: list[str]) -> NoReturn:
    """Run the function in the child: read its bytes from stdin and write its result to stdout."""
    status = 1
    try:
        import gc
        import resource  # not available on every platform

        # As long as there are no limits, import the function and read its bytes.
        name, memory_bytes, cpu_s = arguments
        module, _, function = name.partition(":")
        compute = getattr(import_module(module), function)
        data = sys.stdin.buffer.read()
        gc.disable()

        # From here on only the pipe for the result is open, and nothing else can be opened. The
        # limits are computed first, because that opens a file.
        limits = _limits(int(memory_bytes), int(cpu_s))
        os.close(0)
        os.closerange(2, max(3, os.sysconf("SC_OPEN_MAX")))
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))

        # Write the length and the result; a pipe may take less than requested.
        answer = compute(data)
        for part in (len(answer).to_bytes(_HEADER_BYTES, "little"), answer):
            view = memoryview(part)
            while view:
                view = view[os.write(1, view) :]
        status = 0
    finally:
        # Exit without exit handlers, and without a traceback.
        os._exit(status)


def _limits(memory_bytes: int, cpu_s: int) -> dict[int, int]:
    """Return the child's resource limits; memory and processor time are counted from now on."""
    import resource

    with open("/proc/self/statm", "rb") as statm:
        n_pages = int(statm.read().split()[0])
    used_s = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_AS: n_pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes,
        resource.RLIMIT_CPU: cpu_s + int(used_s.ru_utime + used_s.ru_stime),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    # A limit cannot be raised above the hard limit that the process already has.
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        limits[kind] = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return limits
