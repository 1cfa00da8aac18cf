"""Names in the staging directory of a save, and where its ranks put their checksums."""

from __future__ import annotations

from pathlib import Path

from core.files.object_listing import find_object
from core.files.remote_path import is_remote, location_of
from core.files.store import translate_os_errors

STAGE = ".ckpt-stage"
DATA = "data"
SUMS = "sums"
LOCK = "lock"
"""Object of a save to a bucket that is running."""
WANTS_SUMS = "with-manifest"
"""Object that stands beside ``LOCK`` if the ranks of that save compute checksums."""


def sums_dir_of(data_dir: str | Path) -> Path | None:
    """Return the directory for checksums that belongs to a save; None if it wants no manifest.

    Strategies only get the directory to write into, so that is where they learn it from.

    Args:
        data_dir: the ``checkpoint_dir`` that the strategy was called with.

    Raises:
        StorageError: the system refuses to look at the directory.
    """
    data_path = location_of(data_dir)
    # A bucket has no staging directory: the objects are where they will be.
    if is_remote(data_path):
        has_sums = find_object(data_path / STAGE / WANTS_SUMS) is not None
        return data_path / STAGE / SUMS if has_sums else None
    sums_path = data_path.parent / SUMS
    if (data_path.name, data_path.parent.name) != (DATA, STAGE):
        return None
    with translate_os_errors(str(sums_path), doing="look at"):
        return sums_path if sums_path.is_dir() else None
