"""Publication: complete or not at all, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from core.engine.copy.ledger import ItemRecord, WrittenRun
from core.errors import CapacityError, StorageError, UsageError
from core.files.store import LocalStore
from core.publish.manifest.of_copy import manifest_name, read_manifest
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.journal import FileJournal
from core.publish.stage.protocol import StageRequest
from core.publish.stage.stage import Stage
from tests.support import engine_run, forked

SCRIPT = Path(__file__).parents[2] / "support/engine_run.py"


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for rank in range(2):
        (folder / f"rank{rank}").write_bytes(
            random.Random(rank).randbytes(engine_run.ROWS * 96 * engine_run.TENSORS)
        )
    return folder


@pytest.fixture(scope="module")
def undisturbed(source_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dst = tmp_path_factory.mktemp("undisturbed") / "out"
    engine_run.run(source_dir, dst, {})
    return tree(dst)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def in_process_of_its_own(
    source_dir: Path, dst: Path, **options: int
) -> subprocess.CompletedProcess[str]:
    return forked.run([SCRIPT, source_dir, dst, json.dumps(options)], timeout=120)


def test_the_output_is_right_and_nothing_else_is_left(
    source_dir: Path, undisturbed: dict[str, bytes]
) -> None:
    halves = [(source_dir / f"rank{rank}").read_bytes() for rank in range(2)]
    tensor = b"".join(
        halves[rank][row * 96 : row * 96 + 96]
        for row in range(engine_run.ROWS)
        for rank in range(2)
    )
    first = undisturbed["deep/part0"]
    assert first[32 : 32 + len(tensor)] == tensor
    assert first[4:12] == b"%08x" % zlib.crc32(tensor)
    assert sorted(undisturbed) == [
        "ckpt-manifest.json",
        "deep/part0",
        "deep/part4",
        "deep/part8",
        "index",
    ]


def test_two_runs_are_byte_identical_and_leave_no_stage(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    engine_run.run(source_dir, tmp_path / "made" / "here" / "out", {"resume": 1})
    assert tree(tmp_path / "made" / "here" / "out") == undisturbed
    assert os.listdir(tmp_path / "made" / "here") == ["out"]


@pytest.mark.parametrize("kill_after", [1, 700_000, 1_500_000, 2_300_000])
def test_a_killed_run_is_continued_to_the_same_bytes(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path, kill_after: int
) -> None:
    dst = tmp_path / "out"
    killed = in_process_of_its_own(source_dir, dst, resume=1, kill_after=kill_after)
    assert killed.returncode == -signal.SIGKILL
    assert not dst.exists() and stage_dir_of(dst).exists()
    report = engine_run.run(source_dir, dst, {"resume": 1})
    assert tree(dst) == undisturbed
    assert report["notes"] == ["continuing an interrupted run"]
    lost = kill_after - int(str(report["resumed"]))
    being_synced = being_filled = (
        200_000  # while one thread waits for the disk, the other goes on writing
    )
    assert lost <= being_synced + being_filled + 3 * (64 << 10) + 192 * 1024
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_journal_lists_is_believed_only_if_the_bytes_are_there(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    in_process_of_its_own(source_dir, dst, resume=1, kill_after=1_500_000)
    part = stage_dir_of(dst) / "data" / "deep" / "part0"
    with part.open("r+b") as file:
        file.seek(5000)
        file.write(b"spoiled")
    with (stage_dir_of(dst) / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"items":[[0,[[0,0,')
    report = engine_run.run(source_dir, dst, {"resume": 1})
    assert 0 < int(str(report["resumed"])) < 1_500_000
    assert tree(dst) == undisturbed


def test_a_stage_of_other_options_is_started_anew(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    in_process_of_its_own(source_dir, dst, resume=1, kill_after=1_500_000)
    report = engine_run.run(source_dir, dst, {"resume": 1, "other": 1})
    assert report["resumed"] == 0
    assert "different input or options" in str(report["notes"])
    assert tree(dst) == undisturbed


def test_a_killed_run_without_resume_is_named_and_removed_by_the_next(
    source_dir: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    in_process_of_its_own(source_dir, dst, kill_after=1_000_000)
    assert os.listdir(tmp_path) == [".out.ckpt-stage"]
    report = engine_run.run(source_dir, dst, {})
    assert report["notes"] == ["removed .out.ckpt-stage, left behind by an earlier run"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("how", ["interrupt_after", "fail_after"])
def test_an_interrupt_or_an_error_leaves_nothing(
    source_dir: Path, tmp_path: Path, how: str
) -> None:
    ended = in_process_of_its_own(source_dir, tmp_path / "new" / "out", **{how: 1_000_000})
    assert ended.returncode == (130 if how == "interrupt_after" else 6), ended.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["interrupt_after", "fail_after"])
def test_an_interrupt_or_an_error_keeps_the_stage_with_resume(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path, how: str
) -> None:
    dst = tmp_path / "out"
    in_process_of_its_own(source_dir, dst, resume=1, **{how: 1_500_000})
    assert os.listdir(tmp_path) == [".out.ckpt-stage"]
    report = engine_run.run(source_dir, dst, {"resume": 1})
    assert int(str(report["resumed"])) > 1_000_000
    assert tree(dst) == undisturbed


@pytest.mark.parametrize(
    ("error", "keeps_after", "is_kept"),
    [
        (KeyboardInterrupt(), 0.0, True),
        (KeyboardInterrupt(), 1e9, False),
        (StorageError("broken"), 0.0, False),
        (StorageError("broken"), None, True),
    ],
)
def test_only_an_interrupt_of_long_work_keeps_the_stage_by_itself(
    tmp_path: Path, error: BaseException, keeps_after: float | None, *, is_kept: bool
) -> None:
    dst = tmp_path / "out"
    with (
        pytest.raises(type(error)),
        Stage(dst, StageRequest(resume=True, keeps_after=keeps_after)),
    ):
        raise error
    assert os.listdir(tmp_path) == [".out.ckpt-stage"] * is_kept


def test_a_short_run_that_continues_keeps_the_work_of_the_long_one(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    for keeps_after, notes in ((0.0, []), (1e9, ["continuing an interrupted run"])):
        stage = Stage(dst, StageRequest(resume=True, keeps_after=keeps_after))
        with pytest.raises(KeyboardInterrupt), stage:
            raise KeyboardInterrupt
        assert stage.notes == notes
        assert os.listdir(tmp_path) == [".out.ckpt-stage"]


def test_a_file_size_limit_is_found_out_before_data_moves(source_dir: Path, tmp_path: Path) -> None:
    ended = in_process_of_its_own(source_dir, tmp_path / "out", limit=500_000)
    assert ended.returncode == CapacityError.exit_code
    assert "file too large" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_what_may_be_replaced_is_checked_again_right_before_it_is(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / "old").write_text("old")

    def check() -> None:
        if (dst / "notes.txt").exists():
            raise UsageError("files were added")

    with Stage(dst, StageRequest(force=True, check_replaced=check)) as stage:
        (dst / "notes.txt").write_text("added while the run wrote")
        with pytest.raises(UsageError, match="files were added"):
            stage.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(dst)) == ["notes.txt", "old"]


def test_a_stage_in_use_is_refused(source_dir: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    options = json.dumps({"hold": 60})
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(source_dir), str(dst), options],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match="another process"), Stage(dst):
            pass
        other.send_signal(signal.SIGINT)
        assert other.wait(timeout=60) == 130
    assert os.listdir(tmp_path) == []


def test_an_existing_destination_is_refused_and_untouched(source_dir: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / "mine").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        engine_run.run(source_dir, dst, {})
    assert os.listdir(tmp_path) == ["out"] and os.listdir(dst) == ["mine"]


def test_an_empty_directory_becomes_the_output_and_keeps_its_permissions(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    dst.mkdir(mode=0o750)
    engine_run.run(source_dir, dst, {})
    assert tree(dst) == undisturbed
    assert dst.stat().st_mode & 0o7777 == 0o750
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_that_is_filled_meanwhile_is_untouched(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    with Stage(dst) as stage:
        (dst / "mine").write_text("precious")
        with pytest.raises(UsageError, match="another process"):
            stage.commit()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(dst) == ["mine"]


def test_an_empty_directory_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(UsageError, match="exists"),
        Stage(tmp_path / "out", StageRequest(is_file=True)),
    ):
        pass


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="exists"), Stage(Path(".")):
        pass


def test_force_replaces_only_when_the_new_one_is_complete(
    source_dir: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / "old").write_text("old")
    ended = in_process_of_its_own(source_dir, dst, force=1, fail_after=1_000_000)
    assert ended.returncode == 6 and os.listdir(dst) == ["old"]
    engine_run.run(source_dir, dst, {"force": 1})
    assert tree(dst) == undisturbed
    assert os.listdir(tmp_path) == ["out"]


def test_force_does_not_replace_what_holds_the_source_or_another_kind(
    source_dir: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(UsageError, match="would remove"),
        Stage(source_dir, StageRequest(force=True, keep=[source_dir / "rank0"])),
    ):
        pass
    with (
        pytest.raises(UsageError, match="would remove"),
        Stage(Path.home(), StageRequest(force=True)),
    ):
        pass
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(UsageError, match="is a file, but the output would be a directory"),
        Stage(tmp_path / "file", StageRequest(force=True)),
    ):
        pass
    with (
        pytest.raises(UsageError, match="is a directory, but the output would be a file"),
        Stage(tmp_path, StageRequest(is_file=True, force=True)),
    ):
        pass
    (tmp_path / "link").symlink_to(source_dir)
    with (
        pytest.raises(UsageError, match="is a symbolic link"),
        Stage(tmp_path / "link", StageRequest(force=True)),
    ):
        pass


@pytest.mark.parametrize("force", [0, 1])
def test_a_single_file_is_published_with_its_manifest(
    source_dir: Path, tmp_path: Path, force: int
) -> None:
    dst = tmp_path / "out.bin"
    if force:
        dst.write_text("old")
        (tmp_path / manifest_name("out.bin")).write_text("old")
    engine_run.run(source_dir, dst, {"is_file": 1, "force": force})
    assert sorted(os.listdir(tmp_path)) == ["out.bin", "out.bin.ckpt-manifest.json"]
    manifest = read_manifest(LocalStore(tmp_path), manifest_name("out.bin"))
    assert manifest.files[0].crc == zlib.crc32(dst.read_bytes())


def test_a_destination_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with Stage(dst) as stage:
        stage.store.create("file", 3)
        dst.write_text("mine")
        with pytest.raises(UsageError, match="in the meantime"):
            stage.commit()
    assert os.listdir(tmp_path) == ["out"] and dst.read_text() == "mine"


def test_too_little_space_is_said_with_both_numbers(tmp_path: Path) -> None:
    with (
        pytest.raises(
            CapacityError, match=f"needs {1 << 40:,}.0 MiB, but only [0-9.,]+ MiB is free"
        ),
        Stage(tmp_path / "out", StageRequest(n_bytes=1 << 60)),
    ):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_permission_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission denied"), Stage(tmp_path / "out"):
        pass
    tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not a directory"), Stage(tmp_path / "file" / "out"):
        pass


def test_leaving_without_commit_publishes_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path / "out") as stage:
        stage.store.create("file", 3)
    assert os.listdir(tmp_path) == []


def test_a_journal_line_is_written_after_the_files_are_synced(tmp_path: Path) -> None:
    synced: list[set[str]] = []
    path = tmp_path / "journal"
    journal = FileJournal(
        path, "plan", sync=lambda files: synced.append(set(files)), batch_bytes=100
    )
    first = ItemRecord((WrittenRun(0, 0, 60, 7),))
    journal.add((0, 0), first, {"a"})
    assert synced == [] and journal.done((0, 0)) is None
    journal.add((0, 1), ItemRecord((WrittenRun(1, 0, 60, 8),)), {"b"})
    assert synced == [{"a", "b"}]
    journal.add((0, 2), first, {"a"})
    journal.close()
    again = FileJournal(path, "plan", sync=lambda files: None)
    assert (
        again.done((0, 0)) == first
        and again.done((0, 1)) is not None
        and again.done((0, 2)) is None
    )
    again.close()
    other = FileJournal(path, "another plan", sync=lambda files: None)
    assert other.done((0, 0)) is None
    other.close()


def test_an_interrupt_while_the_lock_is_released_leaves_the_next_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Stage(tmp_path / "out", StageRequest(fsync=False))
    first.__enter__()
    assert first._lock is not None
    lock, close = first._lock.fd, os.close
    others: list[Stage] = []

    def close_and_interrupt(fd: int) -> None:
        close(fd)
        if fd == lock and not others:
            monkeypatch.setattr(os, "close", close)
            others.append(Stage(tmp_path / "out", StageRequest(fsync=False)))
            others[0].__enter__()
            others[0].store.create("a", 3)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close_and_interrupt)
    first.__exit__(None, None, None)
    others[0].commit()
    assert os.path.getsize(tmp_path / "out/a") == 3
