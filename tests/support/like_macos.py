"""Run ``ckpt`` without what only Linux has: ``python -m tests.support.like_macos inspect PATH``.

This is not macOS: the C library, the file system and compiled packages remain those of Linux.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from types import SimpleNamespace

LINUX_ONLY = {
    "os": tuple(
        """
        sched_getaffinity sched_setaffinity posix_fadvise POSIX_FADV_DONTNEED
        memfd_create MFD_CLOEXEC fdatasync posix_fallocate copy_file_range splice
        eventfd pidfd_open getrandom pipe2 getxattr listxattr setxattr O_DIRECT O_PATH
        O_TMPFILE O_NOATIME O_RSYNC SCHED_BATCH setresuid getresuid unshare setns
        RWF_NOWAIT P_PIDFD waitid
        """.split()
    ),
    "fcntl": ("F_ADD_SEALS", "F_OFD_SETLK", "F_SETPIPE_SZ", "F_NOTIFY", "F_SETSIG"),
    "signal": ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "sigtimedwait"),
    "time": ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
}
"""Names that Python's modules have on Linux and not on macOS; ``tests/repository`` looks for them.

Source: the Availability notes of the standard library's documentation (Python 3.11 to 3.13).
"""


def _hide_linux() -> None:
    """Remove the names, the C library's functions and the file systems that only Linux has."""
    for module, names in ((os, "os"), (fcntl, "fcntl"), (signal, "signal"), (time, "time")):
        for name in LINUX_ONLY[names]:
            if hasattr(module, name):
                delattr(module, name)

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and arguments:
            if str(arguments[0]).startswith(("/proc", "/sys/")):
                raise FileNotFoundError(2, "No such file or directory", arguments[0])

    sys.addaudithook(refuse)

    from core.files import sandbox, syscalls

    syscalls._libc = lambda: SimpleNamespace()  # type: ignore[assignment]
    sandbox.sys = SimpleNamespace(platform="darwin", executable=sys.executable)  # type: ignore[assignment]


if __name__ == "__main__":
    _hide_linux()
    from ckpt_cli.__main__ import main

    sys.exit(main())
