"""What the whole runs of this directory have in common: one source, and what one process makes of
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpt_cli.launch.jobs import CKPT, ran, tree, write_source


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes a while to convert."""
    return write_source(tmp_path_factory.mktemp("launch") / "source")


@pytest.fixture(scope="session")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process makes of it: digests of files."""
    place = tmp_path_factory.mktemp("alone")
    alone = ran((*CKPT, "convert", source, place / "out", "--to", "dcp"), place / "printed")
    assert alone.code == 0, alone.errors
    return tree(place / "out")
