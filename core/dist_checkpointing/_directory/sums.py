"""Names in the staging directory of a save, and where its ranks put their checksums."""

from __future__ import annotations

from pathlib import Path

from core.files.object_listing import find_object
from core.files.remote_path import is_remote, location_of

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
    """
    data_path = location_of(data_dir)
    # A bucket has no staging directory: the objects are where they will be.
    if is_remote(data_path):
        has_sums = find_object(data_path / STAGE / WANTS_SUMS) is not None
        return data_path / STAGE / SUMS if has_sums else None
    sums_path = data_path.parent / SUMS
    is_staged = (data_path.name, data_path.parent.name) == (DATA, STAGE)
    return sums_path if is_staged and sums_path.is_dir() else None
