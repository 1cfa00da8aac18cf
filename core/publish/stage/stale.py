"""Remove staging directories that are no longer needed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from core.errors import CheckpointingException
from core.files.folders import sync_folder
from core.files.store import translate_os_errors
from core.publish.stage.folder_lock import lock_folder

_ATTEMPTS = 2


def remove_stage(stage_dir: Path) -> bool:
    """Remove a staging directory, which the caller has locked; return whether it is gone."""
    for _ in range(_ATTEMPTS):
        # Even with ignore_errors, rmtree raises if closing a directory fails.
        with suppress(OSError):
            shutil.rmtree(stage_dir, ignore_errors=True)
        if not os.path.lexists(stage_dir):
            return True
    return False


def clear_finished(stage_dir: Path, dst: Path, *, is_file: bool) -> bool:
    """Remove the staging directory of a run that was killed after publishing its destination.

    A staging directory that contains work, or is in use, is kept.

    Returns:
        True if there is no staging directory any more.
    """
    work = stage_dir / "data" / dst.name if is_file else stage_dir / "data"
    if not os.path.lexists(stage_dir):
        return True
    try:
        lock = lock_folder(stage_dir, dst=dst)
    except CheckpointingException:
        return False
    try:
        return not os.path.lexists(work) and remove_stage(stage_dir)
    finally:
        with suppress(OSError):
            os.close(lock.fd)


def finish_publication(stage_dir: Path, dst: Path) -> None:
    """Finish the work of a run that was killed after its destination got its name.

    Args:
        stage_dir: staging directory of that run, which may be gone; it may contain the manifest of
            a single file, and the old destination.
        dst: the new destination, under its final name.

    Raises:
        StorageError: another process works in the staging directory, or the system refuses.
    """
    if os.path.lexists(stage_dir):
        lock = lock_folder(stage_dir, dst=dst)
        try:
            if not dst.is_dir():
                with translate_os_errors(str(dst), doing="publish the manifest of"):
                    for path in (stage_dir / "data").glob("*"):
                        path.replace(dst.parent / path.name)
            remove_stage(stage_dir)
        finally:
            with suppress(OSError):
                os.close(lock.fd)
    sync_folder(dst.parent)
