"""Unpack the smaller archives of tests/golden (``tests/golden/README.md``)."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def unpacked(name: str, folder: Path) -> Path:
    """Unpack ``tests/golden/NAME.tar.xz`` into a folder, and return the folder.

    scripts/framework-tests may have made ``NAME`` anew; it is copied then.
    """
    made_anew = os.environ.get("CKPT_CHECKOUTS")
    if made_anew and (Path(made_anew) / name).is_dir():
        shutil.copytree(Path(made_anew) / name, folder, dirs_exist_ok=True)
        return folder
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
