from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.errors import UnsupportedError
from core.publish.stage.files import StageStore


def test_names_that_are_one_file_are_refused(tmp_path: Path) -> None:
    """A hard link stands for a file system that does not distinguish upper and lower case."""
    store = StageStore(tmp_path)
    store.create("w/A.bin", 8)
    store.create("w/A.bin", 8)
    os.link(tmp_path / "w/A.bin", tmp_path / "w/a.bin")
    with pytest.raises(UnsupportedError, match="does not distinguish this file name from w/A.bin"):
        store.create("w/a.bin", 8)
