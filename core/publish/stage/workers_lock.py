"""Keep workers of an earlier run from writing into the staging directory of a new run.

The lock is a file in the staging directory, ``workers.lock``. Every worker holds a shared ``flock``
on it as long as it may write; the lead of a new run needs it exclusively for a moment, before it
inspects the staging directory. A new lead therefore waits for workers whose lead has died. The file
contains a random *token*, which the new lead replaces in that moment: a worker that arrives too
late finds another token.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from core.errors import StorageError
from core.files.store import translate_os_errors
from core.files.syscalls import flush
from core.publish.stage.folder_lock import WORKERS_LOCK, close_quietly, is_current, try_lock
from core.values import dataclass

WAIT_SECONDS = 120.0
"""Maximum wait of a new lead; NFS keeps the locks of a vanished host for up to 90 s."""
_PAUSE_SECONDS = 0.1
_TOKEN_BYTES = 16


@dataclass(slots=True)
class WorkersLock:
    """Lock of the workers, as this process holds it.

    Args:
        fd: descriptor of the lock file; closing it releases the lock.
        token: token of the run.
        is_sure: other runs are kept out; False if the file system does not support locks.
    """

    fd: int
    token: str
    is_sure: bool

    def share(self) -> None:
        """Let the other workers lock the staging directory too; the lead keeps its lock.

        Raises:
            StorageError: the lead of another run has taken the lock.
        """
        # flock may release the exclusive lock before it takes the shared one.
        if self.is_sure and not try_lock(self.fd, fcntl.LOCK_SH):
            raise StorageError(
                "another process has started to write to this destination",
                hint="wait until that process has finished",
            )

    def close(self) -> None:
        """Release the lock."""
        fd, self.fd = self.fd, -1
        close_quietly(fd)


def claim_stage(stage_dir: Path, *, wait_s: float = WAIT_SECONDS) -> WorkersLock:
    """Take the lock as the lead of a new run, after all workers of earlier runs have stopped.

    Args:
        stage_dir: the staging directory, which the caller has locked.
        wait_s: how long to wait for workers of earlier runs.

    Raises:
        StorageError: such workers still hold the lock after that time, or the system refuses.
    """
    path = stage_dir / WORKERS_LOCK
    with translate_os_errors(str(path), doing="lock"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            is_sure = _lock_exclusively(fd, path, wait_s)
            # From here on, workers of earlier runs find another token.
            token = os.urandom(_TOKEN_BYTES).hex()
            os.ftruncate(fd, 0)
            os.pwrite(fd, token.encode("ascii"), 0)
            flush(fd)
        except BaseException:
            os.close(fd)
            raise
    return WorkersLock(fd, token, is_sure)


def join_stage(stage_dir: Path, token: str) -> WorkersLock:
    """Take the lock as a worker of the run with this token.

    Raises:
        StorageError: another run has taken over the staging directory, or the system refuses.
    """
    path = stage_dir / WORKERS_LOCK
    with translate_os_errors(str(path), doing="open"):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with translate_os_errors(str(path), doing="lock"):
            is_locked = try_lock(fd, fcntl.LOCK_SH)
            # Read under the lock: while it is held, no lead can replace the token.
            stored_token = os.pread(fd, 2 * _TOKEN_BYTES + 1, 0)
            is_ours = stored_token == token.encode("ascii") and is_current(fd, path)
            if is_locked is False or not is_ours:
                raise StorageError(
                    "another run has taken over the unfinished destination", file=str(stage_dir)
                )
    except BaseException:
        os.close(fd)
        raise
    return WorkersLock(fd, token, is_sure=is_locked is True)


def _lock_exclusively(fd: int, path: Path, wait_s: float) -> bool:
    """Wait for an exclusive lock; return False if the file system does not support locks.

    Raises:
        StorageError: other processes hold the lock after ``wait_s`` seconds.
    """
    # flock cannot wait with a time limit: try repeatedly.
    until = time.monotonic() + wait_s
    while (is_locked := try_lock(fd, fcntl.LOCK_EX)) is False:
        if time.monotonic() >= until:
            raise StorageError(
                f"after {wait_s:.0f} s, workers of an earlier run are still writing to this "
                "destination",
                file=str(path.parent),
                hint="stop them, or wait until they have finished",
            )
        time.sleep(_PAUSE_SECONDS)
    return is_locked is True
