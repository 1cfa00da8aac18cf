"""A directory becomes a checkpoint at once, or stays what it was."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import core.dist_checkpointing._directory.publication as publication
from core.dist_checkpointing._directory.publication import DirectoryPublication
from core.dist_checkpointing._directory.sums import STAGE
from core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config
from core.errors import CheckpointingException, StorageError, UsageError
from tests.support import forked

CONFIG = CheckpointingConfig("own", 3, "own_common", 5)


def _save(target: Path, text: str = "new", *, overwrite: bool = False) -> None:
    stage = DirectoryPublication(target, overwrite=overwrite)
    _fill(stage.data_dir, text)
    stage.publish(CONFIG)


def _fill(data_dir: Path, text: str) -> None:
    (data_dir / "common.pt").write_text(text)
    (data_dir / "w" / "inner").mkdir(parents=True)
    (data_dir / "w" / "inner" / ".zarray").write_text(text)


def _content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _published(text: str = "new") -> dict[str, str]:
    return {"common.pt": text, "w/inner/.zarray": text, "metadata.json": json.dumps(vars(CONFIG))}


def test_what_is_written_appears_with_the_metadata_and_leaves_no_stage(tmp_path):
    stage = DirectoryPublication(tmp_path)
    assert stage.data_dir == DirectoryPublication.data_dir_of(tmp_path) and stage.data_dir.is_dir()
    _fill(stage.data_dir, "new")
    assert os.listdir(tmp_path) == [STAGE] and maybe_load_config(tmp_path) is None
    stage.publish(CONFIG)
    assert _content(tmp_path) == _published() and sorted(os.listdir(tmp_path)) == [
        "common.pt",
        "metadata.json",
        "w",
    ]
    assert maybe_load_config(tmp_path) == CONFIG


def test_an_abandoned_or_dropped_save_leaves_the_directory_as_it_was(tmp_path, caplog):
    stage = DirectoryPublication(tmp_path)
    _fill(stage.data_dir, "new")
    stage.abandon()
    stage.abandon()
    assert os.listdir(tmp_path) == [] and not caplog.records
    dropped = DirectoryPublication(tmp_path)
    _fill(dropped.data_dir, "new")
    del dropped
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert f"save to {tmp_path} was not finalized" in caplog.text


def test_a_save_that_is_not_finalized_is_reported_when_the_program_ends(tmp_path):
    program = (
        "import sys, torch\n"
        "from core.dist_checkpointing import ShardedTensor, save\n"
        "from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue\n"
        "queue = AsyncCallsQueue()\n"
        "state = {'w': ShardedTensor.from_rank_offsets('w', torch.ones(2))}\n"
        "queue.schedule_async_request(save(state, sys.argv[1], async_sharded_save=True))\n"
    )
    done = forked.run(["-c", program, tmp_path], check=True)
    assert f"the asynchronous save to {tmp_path} was not finalized" in done.stderr
    assert maybe_load_config(tmp_path) is None


def test_a_fork_that_ends_does_not_remove_the_stage(tmp_path):
    stage = DirectoryPublication(tmp_path)
    pid = os.fork()
    if not pid:
        stage.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    assert stage.data_dir.is_dir()
    with pytest.raises(StorageError, match="another save into this directory"):
        DirectoryPublication(tmp_path)
    stage.abandon()


def test_a_second_save_into_the_directory_is_refused_while_the_first_goes_on(tmp_path):
    first = DirectoryPublication(tmp_path)
    with pytest.raises(StorageError, match="another save into this directory") as caught:
        DirectoryPublication(tmp_path)
    assert caught.value.file == str(tmp_path)
    first.publish(CONFIG)
    assert os.listdir(tmp_path) == ["metadata.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_missing_or_a_file_is_refused(tmp_path, overwrite):
    with pytest.raises(UsageError, match="does not exist"):
        DirectoryPublication(tmp_path / "missing", overwrite=overwrite)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, not a directory"):
        DirectoryPublication(tmp_path / "file", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_is_not_empty_is_refused_and_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"already contains files \(notes.txt\).*overwrite=True"):
        DirectoryPublication(tmp_path)
    assert _content(tmp_path) == {"notes.txt": "mine"} and os.listdir(tmp_path) == ["notes.txt"]


def test_a_checkpoint_is_replaced_only_when_told_and_other_files_stay(tmp_path):
    _save(tmp_path, "old")
    (tmp_path / "__5_0.distcp").write_text("old")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "shard_0_1.pt").write_text("old")
    (tmp_path / "dataloader").mkdir()
    (tmp_path / "dataloader" / "rank0.bin").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already contains a checkpoint"):
        DirectoryPublication(tmp_path)
    stage = DirectoryPublication(tmp_path, overwrite=True)
    _fill(stage.data_dir, "new")
    assert maybe_load_config(tmp_path) == CONFIG and (tmp_path / "common.pt").read_text() == "old"
    stage.publish(CONFIG)
    assert _content(tmp_path) == _published() | {
        "dataloader/rank0.bin": "mine",
        "notes.txt": "mine",
    }


def test_a_save_that_was_to_replace_a_checkpoint_and_failed_leaves_the_old_one(tmp_path):
    _save(tmp_path, "old")
    stage = DirectoryPublication(tmp_path, overwrite=True)
    _fill(stage.data_dir, "new")
    stage.abandon()
    assert _content(tmp_path) == _published("old") and STAGE not in os.listdir(tmp_path)


def test_a_name_that_appeared_meanwhile_is_not_overwritten(tmp_path):
    stage = DirectoryPublication(tmp_path)
    _fill(stage.data_dir, "new")
    (tmp_path / "w").write_text("theirs")
    with pytest.raises(
        UsageError, match="another program created w in the directory during the save"
    ):
        stage.publish(CONFIG)
    assert _content(tmp_path) == {"w": "theirs"} and os.listdir(tmp_path) == ["w"]


def test_the_metadata_file_is_moved_last(tmp_path, monkeypatch):
    order = []
    move = publication.rename_new
    monkeypatch.setattr(publication, "rename_new", lambda a, b: (order.append(b.name), move(a, b)))
    _save(tmp_path)
    assert order == ["common.pt", "w", "metadata.json"]


def _killed(target: Path, at: int, *, overwrite: bool) -> bool:
    """Saves in a fork that is killed before its rename number ``at``; whether it was."""
    pid = os.fork()
    if not pid:
        moves, move = iter(range(100)), publication.rename_new
        publication.rename_new = lambda source, goal: (
            os.kill(os.getpid(), signal.SIGKILL) if next(moves) == at else move(source, goal)
        )
        try:
            _save(target, overwrite=overwrite)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_save_killed_between_two_renames_is_no_checkpoint_and_does_not_hinder_the_next(
    tmp_path, at
):
    assert _killed(tmp_path, at, overwrite=False)
    assert maybe_load_config(tmp_path) is None and STAGE in os.listdir(tmp_path)
    _save(tmp_path, "next")
    assert _content(tmp_path) == _published("next") and STAGE not in os.listdir(tmp_path)


@pytest.mark.parametrize("at", [0, 2, 4, 5])
def test_a_replacement_killed_between_two_renames_is_undone_by_the_next_save(tmp_path, at):
    _save(tmp_path, "old")
    (tmp_path / "notes.txt").write_text("mine")
    assert _killed(tmp_path, at, overwrite=True)
    config = maybe_load_config(tmp_path)
    assert config is None or (at == 0 and _content(tmp_path)["common.pt"] == "old")
    with pytest.raises(UsageError, match="already contains a checkpoint"):
        DirectoryPublication(tmp_path)
    assert _content(tmp_path) == _published("old") | {"notes.txt": "mine"}
    _save(tmp_path, "next", overwrite=True)
    assert _content(tmp_path) == _published("next") | {"notes.txt": "mine"}


def test_the_next_save_removes_the_stage_of_a_process_killed_after_its_last_rename(
    tmp_path,
):
    _save(tmp_path, "old")
    stage = tmp_path / STAGE
    (stage / "old").mkdir(parents=True)
    (stage / "old" / "common.pt").write_text("older")
    (stage / "entries.json").write_text(
        json.dumps({"entries": ["common.pt", "w", "metadata.json"]})
    )
    with pytest.raises(UsageError, match="already contains a checkpoint"):
        DirectoryPublication(tmp_path)
    assert _content(tmp_path) == _published("old") and STAGE not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[", "[1]", '{"entries": 3}', '{"entries": ["../x", "..", "", 5, "/etc"]}']
)
def test_a_damaged_or_hostile_list_of_moved_entries_moves_nothing(tmp_path, text):
    (tmp_path / "x").write_text("mine")
    target = tmp_path / "target"
    (target / STAGE / "data").mkdir(parents=True)
    (target / STAGE / "entries.json").write_text(text)
    _save(target)
    assert _content(target) == _published() and (tmp_path / "x").read_text() == "mine"


def test_a_stage_that_is_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    (target / STAGE).symlink_to(elsewhere)
    with pytest.raises(CheckpointingException):
        DirectoryPublication(target)
    assert (elsewhere / "mine").read_text() == "x"


def test_a_failed_publication_is_undone(tmp_path, monkeypatch):
    _save(tmp_path, "old")
    move = publication.rename_new

    def failing(source: Path, goal: Path) -> None:
        if goal.parent == tmp_path and goal.name == "w":
            raise OSError(5, "Input/output error")
        move(source, goal)

    monkeypatch.setattr(publication, "rename_new", failing)
    stage = DirectoryPublication(tmp_path, overwrite=True)
    _fill(stage.data_dir, "new")
    with pytest.raises(StorageError, match="cannot publish .*: input/output error"):
        stage.publish(CONFIG)
    assert _content(tmp_path) == _published("old") and STAGE not in os.listdir(tmp_path)


def test_files_of_a_stage_that_was_removed_and_made_again_are_not_published(tmp_path):
    stage = DirectoryPublication(tmp_path)
    _fill(stage.data_dir, "lost")
    shutil.rmtree(stage.data_dir.parent)
    stage.data_dir.mkdir(parents=True)  # a rank that comes later writes into its path
    (stage.data_dir / "__1_0.distcp").write_text("late")
    with pytest.raises(StorageError, match="removed"):
        stage.publish(CONFIG)
    assert os.listdir(tmp_path) == [STAGE]
    _save(tmp_path)
    assert _content(tmp_path) == _published()
