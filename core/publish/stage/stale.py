"""Remove staging directories that are no longer needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from core.errors import CheckpointingException
from core.files.folders import sync_folder
from core.files.store import translate_os_errors
from core.publish.stage.folder_lock import lock_stage, stage_dir_of

_ATTEMPTS = 2
_PATIENCE = 3
"""Attempts to clean up, each of which Ctrl-C may interrupt."""


def finish_despite_interrupts(clean_up: Callable[[], None]) -> None:
    """Run a clean-up that can be repeated, again if Ctrl-C interrupts it."""
    for _ in range(_PATIENCE):
        with suppress(KeyboardInterrupt):
            clean_up()
            return


def remove_stage(stage_dir: Path) -> bool:
    """Remove a staging directory, which the caller has locked; return whether it is gone."""
    for _ in range(_ATTEMPTS):
        # Even with ignore_errors, rmtree raises if closing a directory fails.
        with suppress(OSError):
            shutil.rmtree(stage_dir, ignore_errors=True)
        if not os.path.lexists(stage_dir):
            return True
    return False


def clear_finished(dst: Path, *, is_file: bool) -> None:
    """Remove the staging directory of a run that was killed after publishing its destination.

    A staging directory that contains work, or is in use, is kept.
    """
    stage_dir = stage_dir_of(dst)
    work = stage_dir / "data" / dst.name if is_file else stage_dir / "data"
    if os.path.lexists(stage_dir):
        with suppress(CheckpointingException), closing(lock_stage(dst)):
            if not os.path.lexists(work):
                remove_stage(stage_dir)


def finish_publication(dst: Path) -> None:
    """Finish the work of a run that was killed after its destination got its name.

    Its staging directory may be gone; it may contain the manifest of a single file, and the old
    destination.

    Args:
        dst: the new destination, under its final name.

    Raises:
        StorageError: another process works in the staging directory, or the system refuses.
    """
    stage_dir = stage_dir_of(dst)
    if os.path.lexists(stage_dir):
        with closing(lock_stage(dst)):
            if not dst.is_dir():
                place_manifest(stage_dir / "data", dst)
            remove_stage(stage_dir)
    sync_folder(dst.parent)


def place_manifest(data_dir: Path, dst: Path) -> None:
    """Move the manifest of a single file, which is published, from the stage to its place.

    Raises:
        StorageError: the system refuses.
    """
    with translate_os_errors(str(dst), doing="publish the manifest of"):
        for name in os.listdir(data_dir) if os.path.lexists(data_dir) else ():
            os.replace(data_dir / name, dst.parent / name)
