"""Who may write into a stage: the workers of one run, and nobody who is left of an earlier one.

A file in the stage, ``workers.lock``. Every worker holds a shared ``flock`` on it as long as it may write; the lead of
a new run needs it exclusively for a moment, before it looks at the stage. So it waits for workers whose lead has died.
The file holds a random *token*, which the new lead replaces in that moment: a worker that comes too late finds another.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.errors import StorageError
from core.files.store import translate_os_errors
from core.stage.folder_lock import WITHOUT_LOCKS, is_current

NAME = "workers.lock"
WAIT_SECONDS = 120.0
"""How long a new lead waits. NFS keeps the locks of a host that has vanished for up to 90 s."""
_PAUSE_SECONDS = 0.1
_TOKEN_BYTES = 16


@dataclass(slots=True)
class WorkersLock:
    """The lock as this process holds it.

    Args:
        fd: of the file; closing it ends the lock.
        token: of the run.
        is_sure: whether others are kept out; False where the file system has no locks.
    """

    fd: int
    token: str
    is_sure: bool

    def share(self) -> None:
        """Lets the workers in; the lead stays one of them.

        Raises:
            StorageError: another lead was quicker.
        """
        if self.is_sure and not _locked(self.fd, fcntl.LOCK_SH):
            raise StorageError("another process has begun to write this destination", hint="wait for it")

    def close(self) -> None:
        """Ends it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def claim(stage_dir: Path, *, wait_s: float = WAIT_SECONDS) -> WorkersLock:
    """The lock for a lead: no worker of an earlier run writes any more, and none will.

    Args:
        stage_dir: of the stage, which the caller has locked.
        wait_s: how long to wait for such workers.

    Raises:
        StorageError: they are still there; or the system refuses.
    """
    path = stage_dir / NAME
    with translate_os_errors(str(path), doing="lock"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            is_sure = _wait(fd, path, wait_s)
            token = os.urandom(_TOKEN_BYTES).hex()
            os.ftruncate(fd, 0)
            os.pwrite(fd, token.encode("ascii"), 0)
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
    return WorkersLock(fd, token, is_sure)


def hold(stage_dir: Path, token: str) -> WorkersLock:
    """The lock for a worker, as long as it works in the stage.

    Raises:
        StorageError: the stage belongs to another run by now; or the system refuses.
    """
    path = stage_dir / NAME
    with translate_os_errors(str(path), doing="open"):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with translate_os_errors(str(path), doing="lock"):
            try:
                is_free = _locked(fd, fcntl.LOCK_SH)
                is_sure = True
            except OSError as err:
                if err.errno not in WITHOUT_LOCKS:
                    raise
                is_free, is_sure = True, False
            found = os.pread(fd, 2 * _TOKEN_BYTES + 1, 0)
            if not is_free or found != token.encode("ascii") or not is_current(fd, path):
                raise StorageError("another run has taken over the unfinished destination", file=str(stage_dir))
    except BaseException:
        os.close(fd)
        raise
    return WorkersLock(fd, token, is_sure)


def _wait(fd: int, path: Path, wait_s: float) -> bool:
    """Locks exclusively; whether the file system can."""
    until = time.monotonic() + wait_s
    try:
        while not _locked(fd, fcntl.LOCK_EX):
            if time.monotonic() >= until:
                raise StorageError(
                    f"workers of an earlier run still write here after {wait_s:.0f} s",
                    file=str(path.parent),
                    hint="end them, or wait until they have ended",
                )
            time.sleep(_PAUSE_SECONDS)
    except OSError as err:
        if err.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
