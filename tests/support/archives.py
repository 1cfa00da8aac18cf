"""Unpack the smaller archives of tests/golden (``tests/golden/README.md``)."""

from __future__ import annotations

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def unpacked(name: str, folder: Path) -> Path:
    """Unpack ``tests/golden/NAME.tar.xz`` into a folder, and return the folder."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
