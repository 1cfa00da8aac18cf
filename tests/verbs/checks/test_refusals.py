"""Over the whole table of damages: what ``convert`` refuses, ``validate`` finds, and the other way
round.

The hostile corpus is held to the same in ``tests/hostile``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from core.errors import CheckpointingException
from core.verbs.checks.check import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.covering import covering_cases
from tests.support.damages import DCP, LEGACY, ONE, TABLE, TORCH, ZARR3, Row, kind_of
from tests.support.real_readers import read_dcp, read_safetensors, read_torch
from tests.support.refusals import check_agreement
from tests.verbs.checks.test_damages import copied, row_id, sharded

__all__ = ["sharded"]


def is_refused(path: Path, dst: Path) -> bool:
    """Return whether a conversion to torch, the format that holds everything, ends with an
    error.
    """
    try:
        run(Job(src=path, dst=dst, to="torch", fsync=False))
    except CheckpointingException:
        return True
    return False


def is_found(path: Path) -> bool:
    """Return whether ``validate --headers``, or else ``--deep``, finds an error."""
    return any(
        finding.severity == Severity.ERROR
        for level in (Level.HEADERS, Level.DEEP)
        for finding in validate(path, level=level).findings
    )


@pytest.mark.long
@pytest.mark.parametrize("source", sorted({row.source for row in TABLE}))
def test_what_is_damaged_was_sound(
    source: str, golden: Path, sharded: Path, tmp_path: Path
) -> None:
    path = copied(sharded if source == ZARR3 else golden / source, tmp_path)
    assert not is_refused(path, tmp_path / "out")
    assert not is_found(path)


def reads(path: Path, row: Row) -> bool:
    """Return whether torch or safetensors can read a damaged checkpoint, each in a fashion of its
    own.
    """
    try:
        if row.source in (TORCH, LEGACY):
            read_torch(path)
        elif row.source == ONE:
            read_safetensors(path)
        else:
            read_dcp(path)
    except (Exception, CheckpointException):  # whatever they raise; DCP's own is no Exception
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row",
    covering_cases(
        (row for row in TABLE if row.source in (TORCH, LEGACY, ONE, DCP)),
        lambda row: {"source and codes": (row.source, *kind_of(row)["codes"])},
    ),
    ids=row_id,
)
def test_what_the_real_reader_refuses_is_refused(row: Row, golden: Path, tmp_path: Path) -> None:
    path = copied(golden / row.source, tmp_path)
    row.breaks(path / row.at if row.at else path)
    if not (path if path.is_file() else path / row.at).is_fifo() and not reads(path, row):
        assert is_refused(path, tmp_path / "out")


@pytest.mark.parametrize("row", covering_cases(TABLE, kind_of), ids=row_id)
def test_a_damage_is_refused_exactly_where_it_is_found(
    row: Row, golden: Path, sharded: Path, tmp_path: Path
) -> None:
    path = copied(sharded if row.source == ZARR3 else golden / row.source, tmp_path)
    row.breaks(path / row.at if row.at else path)
    check_agreement(
        f"{row.source}: {row.what}",
        is_refused=is_refused(path, tmp_path / "out"),
        is_found=is_found(path),
    )
