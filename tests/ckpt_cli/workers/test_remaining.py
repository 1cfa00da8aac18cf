"""ckpt_cli.workers.remaining: what an interrupted command says it has left is on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_cli.workers.remaining import InterruptedOutput
from core.engine.copy.ledger import ItemRecord, WrittenRun
from core.files.remote_path import location_of
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.journal import FileJournal, journal_path


def test_without_resume_nothing_remains(tmp_path: Path) -> None:
    destination = InterruptedOutput(tmp_path / "out", keeps_partial=False, has_begun=True)
    assert destination.remaining() == (
        "nothing was written (rerun with --resume to keep partial work next time)"
    )


def test_partial_output_is_named_only_if_there_is_some(tmp_path: Path) -> None:
    path = tmp_path / "out"
    destination = InterruptedOutput(path, keeps_partial=True, has_begun=True)
    assert destination.remaining() == "nothing was written (rerun the same command)"
    stage_dir = stage_dir_of(path)
    stage_dir.mkdir()
    assert destination.remaining() == (
        f"the beginning of the output is kept in {stage_dir}; continue with the same command "
        f"(or remove it: rm -r {stage_dir})"
    )


def test_what_is_done_is_kept_with_the_command_that_continues(tmp_path: Path) -> None:
    path = tmp_path / "two words"
    stage_dir = stage_dir_of(path)
    stage_dir.mkdir()
    journal = FileJournal(journal_path(stage_dir), "plan", sync=lambda files: None)
    journal.add((0, 0), ItemRecord((WrittenRun("w", 0, 3 << 20, 0),), ()), ["w"])
    journal.flush()
    journal.close()
    command = "ckpt convert run 'two words' --to dcp"
    destination = InterruptedOutput(path, keeps_partial=False, command=command, has_begun=True)
    assert destination.remaining() == (
        f"3.0 MiB of the output is kept in {stage_dir}; continue: {command} "
        f"(or remove it: rm -r '{stage_dir}')"
    )


def test_a_stage_that_could_not_be_removed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out"
    stage_dir_of(path).mkdir()
    assert InterruptedOutput(path, keeps_partial=False, has_begun=True).remaining() == (
        f"{stage_dir_of(path)} could not be removed (the next run will remove it)"
    )


def test_an_old_checkpoint_is_unchanged_until_the_new_one_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    destination = InterruptedOutput(path, keeps_partial=False, has_begun=True)
    assert destination.remaining().startswith(f"nothing was written, {path} is unchanged (")
    destination.inode = path.stat().st_ino + 1
    assert "is unchanged" in destination.remaining()
    destination.inode = path.stat().st_ino
    assert destination.remaining() == f"{path} was already complete"


def test_a_destination_without_a_name_may_have_partial_output() -> None:
    assert InterruptedOutput(None, keeps_partial=True, has_begun=True).remaining() == (
        "partial output, if any, is kept (rerun the same command to continue)"
    )


def test_partial_output_of_another_run_is_not_named_as_work_of_an_interrupted_planning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out"
    stage_dir = stage_dir_of(path)
    stage_dir.mkdir()
    for keeps_partial in (True, False):
        destination = InterruptedOutput(path, keeps_partial=keeps_partial, command="ckpt again")
        assert destination.remaining() == (
            f"nothing was written; {stage_dir} is the partial output of another run "
            "(to continue it, rerun the command that began it)"
        )
    for dst in (None, location_of("s3://runs/llama/out")):
        destination = InterruptedOutput(dst, keeps_partial=True)
        assert destination.remaining() == "nothing was written (rerun the same command)"


@pytest.mark.parametrize("has_boto3", [True, False])
def test_uploads_that_stay_in_a_bucket_are_named_with_their_cost_and_how_to_remove_them(
    has_boto3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = object() if has_boto3 else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    dst = location_of("s3://runs/llama/out")
    text = InterruptedOutput(
        dst, keeps_partial=True, command="ckpt again", has_begun=True
    ).remaining()
    listed = "aws s3api list-multipart-uploads --bucket runs --prefix llama/out"
    if has_boto3:
        assert "for which the store charges (continue: ckpt again; " in text and listed in text
    else:
        assert "rerun the command with --force" in text and "finishes publishing" not in text
    text = InterruptedOutput(dst, keeps_partial=False, has_begun=True).remaining()
    assert ("--resume keeps the data already sent" in text) == has_boto3
