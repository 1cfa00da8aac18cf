"""The torch files of each rank in tests/golden/dtensor.tar.xz; see tests/golden/README.md."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "golden" / "dtensor.tar.xz"


def unpacked(folder: Path) -> Path:
    """Unpack the archive into a folder, and return the folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder
