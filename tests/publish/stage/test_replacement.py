"""A run that ended between two renames: what was there before is not lost, and not mixed with the
new.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.copy.ledger import ItemRecord, WrittenRun
from core.errors import StorageError, UsageError
from core.files.folders import make_folders, remove_empty
from core.publish.manifest.of_copy import manifest_name
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.journal import FileJournal
from core.publish.stage.protocol import StageRequest
from core.publish.stage.replacement import replace_dir, undo_replacement
from core.publish.stage.stage import Stage
from core.verbs.convert.job import Job
from core.verbs.convert.run import run


def stage_of(dst: Path, *files: str) -> Path:
    """A stage that a killed run has left, with some files."""
    stage_dir = stage_dir_of(dst)
    for file in files:
        path = stage_dir / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file)
    return stage_dir


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_run_had_set_aside_is_put_back(tmp_path: Path, resume: bool) -> None:
    dst = tmp_path / "out"
    stage_of(dst, "old/out/w", "data/w", "data/new")
    with pytest.raises(UsageError, match="exists"), Stage(dst, StageRequest(resume=resume)):
        pass
    assert (dst / "w").read_text() == "old/out/w" and os.listdir(dst) == ["w"]


def test_what_was_set_aside_is_put_back_before_it_is_replaced_again(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    stage_of(dst, "old/out/w", "data/w")
    with Stage(dst, StageRequest(force=True)) as stage:
        assert (dst / "w").read_text() == "old/out/w"
        assert stage.notes[0] == "restored out, which an interrupted run had moved aside"
    assert (dst / "w").read_text() == "old/out/w" and os.listdir(tmp_path) == ["out"]


def test_a_manifest_goes_back_to_its_file_unless_a_new_file_stands_there(tmp_path: Path) -> None:
    dst = tmp_path / "out.pt"
    dst.write_text("old")
    manifest = manifest_name(dst.name)
    stage_dir = stage_of(dst, f"old/{manifest}", f"data/{dst.name}")
    assert undo_replacement(stage_dir, dst)
    assert (tmp_path / manifest).read_text() == f"old/{manifest}"
    (tmp_path / manifest).unlink()
    (stage_dir / "data" / dst.name).unlink()
    stage_of(dst, f"old/{manifest}")
    assert not undo_replacement(stage_dir, dst)
    assert not (tmp_path / manifest).exists()


def test_a_directory_that_was_exchanged_is_not_continued(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with Stage(dst, StageRequest(resume=True, identify=lambda: "plan")) as stage:
        stage.store.create("new", 3)
        stage_dir_of(dst).rename(tmp_path / "killed")
    stage_dir = stage_dir_of(dst)
    (tmp_path / "killed").rename(stage_dir)
    (stage_dir / "data").rename(dst)  # as if killed right after the exchange of both names
    (stage_dir / "data").mkdir()
    (stage_dir / "data" / "old").write_text("of the replaced one")
    with Stage(dst, StageRequest(resume=True, force=True, identify=lambda: "plan")) as stage:
        assert "with different input or options" in stage.notes[0]
        stage.store.create("new", 3)
        stage.commit()
    assert os.listdir(dst) == ["new"] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_the_stage_of_a_run_that_had_finished_is_cleared_away(tmp_path: Path, name: str) -> None:
    dst = tmp_path / name
    is_file = name.endswith(".pt")
    if not is_file:
        dst.mkdir()
    (dst if is_file else dst / "w").write_text("")
    stage_of(dst, "journal.jsonl", *(["data/manifest"] if is_file else []))
    with pytest.raises(UsageError) as caught, Stage(dst, StageRequest(is_file=is_file)):
        pass
    assert os.listdir(tmp_path) == [name] and "earlier run" not in str(caught.value)


def test_a_stage_with_work_in_it_is_named_where_the_destination_exists(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / "w").write_text("")
    stage_of(dst, "data/w")
    with (
        pytest.raises(
            UsageError, match="out.ckpt-stage next to it is left over from an earlier run"
        ),
        Stage(dst),
    ):
        pass
    assert (stage_dir_of(dst) / "data" / "w").exists()


def test_unfinished_work_is_kept_where_its_journal_cannot_be_read(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    stage_of(dst, "data/w", "journal.jsonl/in the way")
    with pytest.raises(StorageError, match="cannot read"), Stage(dst, StageRequest(resume=True)):
        pass
    assert (stage_dir_of(dst) / "data" / "w").exists()


def test_after_a_failed_sync_nothing_more_is_recorded(tmp_path: Path) -> None:
    fails = [True, False]

    def sync(files: object) -> None:
        if fails.pop(0):
            raise StorageError("input/output error")

    path = tmp_path / "journal"
    journal = FileJournal(path, "plan", sync=sync, batch_bytes=10)
    item = ItemRecord((WrittenRun(0, 0, 60, 7),))
    with pytest.raises(StorageError):
        journal.add((0, 0), item, {"a"})
    journal.add(
        (0, 1), item, {"a"}
    )  # the system would say that all is well: it reports lost bytes once
    journal.flush()
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"journal": 2, "plan": "plan"}
    ]


def test_folders_are_made_and_removed_as_long_as_they_are_empty(tmp_path: Path) -> None:
    folders = make_folders(tmp_path / "a" / "b" / "c")
    assert folders == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    (tmp_path / "a" / "mine").write_text("")
    remove_empty(folders)
    assert os.listdir(tmp_path / "a") == ["mine"]


def test_files_that_were_added_to_a_checkpoint_are_not_replaced_with_it(
    golden: Path, tmp_path: Path
) -> None:
    job = Job(src=golden / "hf/llama/safetensors_sharded", dst=tmp_path / "out", fsync=False)
    run(job)
    (tmp_path / "out/.DS_Store").touch()  # of a file manager
    run(replace(job, force=True))
    for name in (".git/HEAD", "link"):  # hidden, and broken
        path = tmp_path / "out" / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to("absent")
        with pytest.raises(UsageError, match=f"would be lost: {re.escape(name)}"):
            run(replace(job, force=True))
        path.unlink()
    (tmp_path / "out/notes").mkdir()
    (tmp_path / "out/notes/run.txt").write_text("lr 1e-4")
    with pytest.raises(UsageError, match=r"added to it and would be lost: notes/run\.txt"):
        run(replace(job, force=True))
    assert (tmp_path / "out/notes/run.txt").read_text() == "lr 1e-4"
    (tmp_path / "out/notes/run.txt").rename(tmp_path / "run.txt")
    run(replace(job, force=True, to="dcp"))
    assert (tmp_path / "out/.metadata").exists()


def test_what_was_set_aside_survives_a_directory_that_a_script_makes_anew(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    stage_of(dst, "old/out/w", "data/w", "data/new")
    dst.mkdir()
    with pytest.raises(UsageError, match="exists"), Stage(dst):
        pass
    assert (dst / "w").read_text() == "old/out/w"

    # Something else has the name: neither of the two is removed.
    dst = tmp_path / "other"
    stage_dir = stage_of(dst, "old/other/w", "data/w")
    dst.mkdir()
    (dst / "results.json").touch()
    with pytest.raises(UsageError, match="was created again"), Stage(dst, StageRequest(force=True)):
        pass
    assert (stage_dir / "old/other/w").exists() and (dst / "results.json").exists()


def test_an_empty_directory_that_its_owner_may_not_write_is_replaced_with_its_mode(
    tmp_path: Path,
) -> None:
    dst, data_dir = tmp_path / "out", tmp_path / "data"
    dst.mkdir()
    data_dir.mkdir()
    dst.chmod(0o555)
    replace_dir(data_dir, dst, force=False)
    assert dst.stat().st_mode & 0o777 == 0o555 and not data_dir.exists()
