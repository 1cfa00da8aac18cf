"""Stages that are of no use any more: removed, or at least named."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from core.errors import CheckpointingException
from core.folder_lock import lock_folder

_ATTEMPTS = 2


def remove_stage(stage_dir: Path) -> bool:
    """Removes a stage, which the caller has locked, as far as the system lets it; whether it is gone."""
    for _ in range(_ATTEMPTS):
        with suppress(OSError):  # what rmtree does not ignore: errors of closing
            shutil.rmtree(stage_dir, ignore_errors=True)
        if not os.path.lexists(stage_dir):
            return True
    return False


def clear_finished(stage_dir: Path, dst: Path, *, is_file: bool) -> bool:
    """Removes the stage of a run that published its destination, and was killed before it could tidy up.

    A stage with work in it stays, and one that is in use.

    Returns:
        Whether there is no stage any more.
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
