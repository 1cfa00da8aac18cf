"""Validation of many entries takes work in proportion to their number: calls are counted, and no
clock is read.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from core.formats.dcp import metadata as dcp_metadata
from core.formats.dcp.metadata_writer import ChunkRow, TensorRow, write_metadata
from core.verbs.checks.check import Level
from core.verbs.validate.run import validate
from tests.hostile.cases import FOUR, ITEM, torch_zip

MOST_CALLS = 1000
"""Of Python functions, per entry; they are about 200."""


def without_items(path: Path, n: int) -> Path:
    """A checkpoint whose metadata lists tensors of which no file holds a byte, which is an error
    each.
    """
    rows = [
        TensorRow(f"layers.{i}.w", "float32", (4,), [ChunkRow((0,), (4,), "x", 0, 0)])
        for i in range(n)
    ]
    (path / ".metadata").write_bytes(write_metadata(rows, planner_data=None))
    return path


def without_files(path: Path, n: int) -> Path:
    """A checkpoint of which only the metadata are there, a file a tensor."""
    rows = [
        TensorRow(
            f"layers.{i}.w",
            "float32",
            (4,),
            [ChunkRow((0,), (4,), f"__{i}_0.distcp", 0, len(ITEM))],
        )
        for i in range(n)
    ]
    (path / ".metadata").write_bytes(write_metadata(rows, planner_data=None))
    return path


def a_zip(path: Path, n: int) -> Path:
    """A torch file with that many records."""
    records = {f"data/{i}": bytes(16) for i in range(n)}
    (path / "model.pt").write_bytes(torch_zip(b"\x80\x02}X\x01\0\0\0w" + FOUR + b"s.", **records))
    return path / "model.pt"


def many_roots(path: Path, n: int) -> Path:
    """A zip of which every record has a root of its own, which is an error each."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02}.")
        for i in range(n):
            archive.writestr(f"r{i}/x", b"x")
    (path / "model.pt").write_bytes(file.getvalue())
    return path / "model.pt"


def n_calls(path: Path, level: Level, *, of: Callable[..., object] | None = None) -> int:
    """Return how many functions a validation calls, or how often it calls one of them."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if of is None:
            count += event in ("call", "c_call")
        else:
            count += event == "call" and frame.f_code is of.__code__

    sys.setprofile(note)
    try:
        validate(path, level=level)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.each_value
@pytest.mark.parametrize(
    "level", [Level.METADATA, Level.HEADERS], ids=lambda level: level.name.lower()
)
@pytest.mark.parametrize(
    "make", [without_items, without_files, a_zip, many_roots], ids=lambda make: make.__name__
)
def test_the_work_grows_with_the_number_of_entries(
    make: Callable[[Path, int], Path], level: Level, tmp_path: Path
) -> None:
    counts = []
    for n in (400, 1600):
        (tmp_path / str(n)).mkdir()
        counts.append(n_calls(make(tmp_path / str(n), n), level))
    few, many = counts
    assert (many - few) / 1200 < MOST_CALLS
    assert many < 4.5 * few


def test_metadata_that_make_no_sense_are_read_once(tmp_path: Path) -> None:
    """However many checks ask for what does make sense."""
    path = without_items(tmp_path, 7)
    assert n_calls(path, Level.HEADERS, of=dcp_metadata.parse_by_machine) == 1
