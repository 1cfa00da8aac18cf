"""Names in the staging directory of a save, and where its ranks put their checksums."""

from __future__ import annotations

from pathlib import Path

STAGE = ".ckpt-stage"
DATA = "data"
SUMS = "sums"


def sums_dir_of(data_dir: str | Path) -> Path | None:
    """Return the directory for checksums that belongs to a save; None if it wants no manifest.

    Strategies only get the directory to write into, so that is where they learn it from.

    Args:
        data_dir: the ``checkpoint_dir`` that the strategy was called with.
    """
    data_path = Path(data_dir)
    sums_path = data_path.parent / SUMS
    is_staged = (data_path.name, data_path.parent.name) == (DATA, STAGE)
    return sums_path if is_staged and sums_path.is_dir() else None
