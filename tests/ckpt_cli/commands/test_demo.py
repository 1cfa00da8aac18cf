"""``ckpt demo``: the checkpoints that the documentation's examples run on."""

from __future__ import annotations

import shlex
import tarfile
import time
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.commands import demo


def test_what_it_writes_is_dated_now_and_its_proposals_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = time.time() - 10  # clocks of file systems are coarse
    assert main(["demo"]) == 0
    head, _, change_directory, *commands = capsys.readouterr().out.splitlines()
    assert head == "✓ wrote playground: 20 checkpoints, 16.4 MiB"
    assert change_directory == "  cd playground"
    playground = tmp_path / "playground"
    assert min(path.stat().st_mtime for path in playground.rglob("*")) >= begun
    assert len(commands) == 3
    monkeypatch.chdir(playground)
    codes = [main(shlex.split(command)[1:]) for command in commands]
    assert codes == [0, 0, 1]  # the last is about a damaged run


def test_a_directory_that_is_not_empty_and_a_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, state in ((tmp_path, "is not empty"), (tmp_path / "file", "is a file")):
        assert main(["demo", str(path)]) == 2
        assert f"{path} {state}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_directory_is_filled_and_emptied_again_after_a_failure(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_dir = tmp_path / "small ones"
    if exists:
        target_dir.mkdir()
    # The archive ends early, as on a damaged disk.
    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(demo.ARCHIVE.read_bytes()[:1_500_000])
    with monkeypatch.context() as patch:
        patch.setattr(demo, "ARCHIVE", damaged)
        assert main(["demo", str(target_dir)]) != 0
    assert target_dir.exists() == exists
    assert main(["demo", str(target_dir)]) == 0
    assert (target_dir / "runs/damaged/iter_0000020/mp_rank_03").is_dir()


def test_a_failure_leaves_what_others_have_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_dir = tmp_path / "playground"
    archive_open = tarfile.open

    def open_late(archive: Path) -> tarfile.TarFile:
        for name in ("notes.txt", "runs/llama/model.bin"):
            (target_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (target_dir / name).write_text("somebody else's")
        return archive_open(archive)

    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(demo.ARCHIVE.read_bytes()[:1_500_000])
    monkeypatch.setattr(demo, "ARCHIVE", damaged)
    monkeypatch.setattr(tarfile, "open", open_late)
    assert main(["demo", str(target_dir)]) != 0
    files = [path for path in target_dir.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["model.bin", "notes.txt"]
    assert {path.read_text() for path in files} == {"somebody else's"}


def test_the_archive_is_small_and_names_nothing_outside() -> None:
    assert demo.ARCHIVE.stat().st_size <= 2_000_000
    with tarfile.open(demo.ARCHIVE) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    for member in members:
        parts = member.name.split("/")
        assert all(parts) and ".." not in parts, member.name
        assert (member.uname, member.gname, member.mtime) == ("", "", 0)
