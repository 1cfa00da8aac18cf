from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import UsageError
from core.verbs.checks.check import Level
from core.verbs.validate.newest import Newest, find_newest_valid, iteration_paths
from core.verbs.validate.run import Validation, validate

SOURCE = "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(golden: Path, tmp_path: Path) -> Path:
    """A root with iterations 10, 20 and 30."""
    for number in (10, 20, 30):
        shutil.copytree(golden / SOURCE, tmp_path / f"iter_{number:07d}")
    return tmp_path


def newest(root: Path, *, level: Level = Level.HEADERS) -> Newest:
    def is_whole(path: Path) -> tuple[bool, Validation]:
        report = validate(path, level=level)
        return report.worst is None or report.worst < 3, report

    return find_newest_valid(root, is_whole)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_the_newest_is_taken_if_it_is_whole(root: Path) -> None:
    result = newest(root)
    assert (result.path, result.iteration, result.skipped) == (str(root / "iter_0000030"), 30, ())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / ".metadata").unlink(),
        lambda path: cut(path / "__0_0.distcp"),
        lambda path: (path / "__0_0.distcp").unlink(),
        lambda path: cut(path / ".metadata"),
        shutil.rmtree,
    ],
)
def test_damaged_ones_are_skipped_with_the_reason(
    root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "iter_0000030")
    result = newest(root)
    assert result.iteration == 20
    if (root / "iter_0000030").exists():
        (skipped,) = result.skipped
        assert skipped.path == str(root / "iter_0000030")
        assert skipped.why.startswith("CK")


def test_no_iteration_is_complete(root: Path) -> None:
    for path in iteration_paths(root):
        (path / ".metadata").write_bytes(b"")
    result = newest(root)
    assert result.path is None
    assert [skipped.path for skipped in result.skipped] == [
        str(path) for path in reversed(iteration_paths(root))
    ]


def test_what_is_newer_than_the_tracker_was_not_finished(root: Path) -> None:
    (root / TRACKER).write_text("20")
    result = newest(root)
    assert result.iteration == 20
    assert "newer than iteration 20" in result.skipped[0].why


def test_deepspeeds_tracker_counts_as_well(root: Path) -> None:
    (root / "latest").write_text("global_step20")
    assert newest(root).iteration == 20


@pytest.mark.parametrize("text", ["release", "", "\xff\x00", "9" * 400])
def test_a_tracker_that_names_no_iteration_decides_nothing(root: Path, text: str) -> None:
    (root / TRACKER).write_bytes(text.encode("latin-1"))
    assert newest(root).iteration == 30


def test_a_tracker_that_names_what_is_gone_leaves_the_next(root: Path) -> None:
    (root / TRACKER).write_text("30")
    shutil.rmtree(root / "iter_0000030")
    assert newest(root).iteration == 20


def test_stages_are_named_and_skipped(root: Path) -> None:
    for name in (".iter_0000040.ckpt-tmp", "40.orbax-checkpoint-tmp-1"):
        (root / name).mkdir()
    result = newest(root)
    assert result.iteration == 30
    assert [Path(entry.path).name for entry in result.skipped] == [
        ".iter_0000040.ckpt-tmp",
        "40.orbax-checkpoint-tmp-1",
    ]


def test_numbers_are_compared_and_not_names(root: Path) -> None:
    (root / "iter_0000030").rename(root / "iter_1000000000")
    shutil.copytree(root / "iter_0000010", root / "step-99")
    assert [path.name for path in iteration_paths(root)] == [
        "iter_0000010",
        "iter_0000020",
        "step-99",
        "iter_1000000000",
    ]


def test_a_directory_without_iterations_has_no_newest(golden: Path, tmp_path: Path) -> None:
    for path in (tmp_path, golden / SOURCE):
        assert newest(path) == Newest(None, None, ())
        with pytest.raises(UsageError, match="no iterations"):
            iteration_paths(path)


def test_a_root_that_is_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(UsageError, match="no such directory"):
            newest(path)
