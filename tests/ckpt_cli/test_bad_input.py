"""Whatever is wrong with the input: one line, the documented exit code, no traceback, nothing left
behind.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_cli.app import main
from tests.support.shown_errors import is_one_error

Make = Callable[[Path, Path], Path]
"""(golden checkpoints, an empty directory to work in) → the bad checkpoint."""


def copied(name: str) -> Make:
    def make(golden: Path, folder: Path) -> Path:
        return Path(shutil.copytree(golden / name, folder / "bad"))

    return make


def changed(name: str, change: Callable[[Path], None]) -> Make:
    """A copy of a golden checkpoint with something done to it."""

    def make(golden: Path, folder: Path) -> Path:
        path = copied(name)(golden, folder)
        change(path)
        return path

    return make


def missing(golden: Path, folder: Path) -> Path:
    return folder / "nowhere"


def empty(golden: Path, folder: Path) -> Path:
    (folder / "bad").mkdir()
    return folder / "bad"


def unknown(golden: Path, folder: Path) -> Path:
    (folder / "bad").mkdir()
    (folder / "bad/notes.txt").write_text("hello")
    return folder / "bad"


def text_as_torch(golden: Path, folder: Path) -> Path:
    (folder / "bad.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    return folder / "bad.pt"


def cut(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        os.truncate(path / name, (path / name).stat().st_size // 2)

    return change


def removed(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def written(name: str, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).write_bytes(data)

    return change


class Evil:
    """Pickles as a call of ``os.system``."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch owned",))


def evil_torch_file(golden: Path, folder: Path) -> Path:
    path = folder / "bad.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps({"model": {}, "evil": Evil()}, protocol=2)
        )
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


def renamed_in_metadata(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replaces a string of equal length in ``.metadata``."""

    def change(path: Path) -> None:
        data = (path / ".metadata").read_bytes()
        assert old in data
        assert len(old) == len(new)
        (path / ".metadata").write_bytes(data.replace(old, new))

    return change


RANKS = "mcore_legacy/dense_gqa/tp2_pp2"
DCP = "torch_dcp/tp2_only"
DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"

CASES: dict[str, tuple[Make, int]] = {
    "missing path": (missing, 2),
    "empty directory": (empty, 4),
    "unknown format": (unknown, 4),
    "not a torch file": (text_as_torch, 4),
    "truncated rank file": (
        changed(RANKS, cut("iter_0000010/mp_rank_00_001/model_optim_rng.pt")),
        3,
    ),
    "truncated metadata": (changed(DCP, cut(".metadata")), 3),
    "truncated distcp": (changed(DCP, cut("__1_0.distcp")), 3),
    "absent distcp": (changed(DCP, removed("__1_0.distcp")), 3),
    "absent metadata": (changed(DCP, removed(".metadata")), 3),
    "absent rank": (changed(RANKS, removed("iter_0000010/mp_rank_01_001")), 3),
    "absent iteration": (changed(RANKS, written("latest_checkpointed_iteration.txt", b"20")), 3),
    "bad tracker": (
        changed(RANKS, written("latest_checkpointed_iteration.txt", b"\xff\x1b[2J")),
        3,
    ),
    "bad JSON": (changed(DIST, written("iter_0000010/metadata.json", b'{"sharded_backend": ')), 3),
    "metadata is no pickle": (changed(DCP, written(".metadata", b"{}")), 3),
    "metadata runs code": (changed(DCP, written(".metadata", pickle.dumps(Evil()))), 5),
    "path traversal": (changed(DCP, renamed_in_metadata(b"__1_0.distcp", b"../../secret")), 5),
    "absolute path": (changed(DCP, renamed_in_metadata(b"__1_0.distcp", b"/etc/passwd0")), 5),
}


@pytest.mark.each_value
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_bad_checkpoints_are_refused(
    case: str,
    command: str,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make, exit_code = CASES[case]
    (tmp_path / "work").mkdir()
    path = make(golden, tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    rest = [] if command == "inspect" else [str(tmp_path / "work/out"), "--to", "torch"]
    assert main([command, str(path), *rest]) == exit_code
    out, err = capsys.readouterr()
    # inspect shows what can be read of a damaged checkpoint, below the damage, and the error as
    # well, for whoever reads only that.
    is_shown = command == "inspect" and out.startswith("✗ damaged")
    assert is_one_error(err) and (is_shown or out == "")
    assert all(line.isprintable() for line in (out + err).splitlines())
    assert "Traceback" not in err
    assert "internal error" not in err
    assert sorted(tmp_path.rglob("*")) == before
    assert main([command, str(path), *rest, "--json"]) == exit_code
    fields = json.loads(capsys.readouterr().out)
    if is_shown:
        assert all(problem["message"] for problem in fields["problems"])
    else:
        assert fields["error"]["exit_code"] == exit_code
        assert fields["error"]["message"]


def test_a_file_that_would_run_code_is_shown_but_not_converted(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = evil_torch_file(golden, tmp_path)
    assert main(["inspect", str(path)]) == 0
    assert "system" in capsys.readouterr().out
    assert main(["convert", str(path), "out", "--to", "dcp"]) == 5
    assert "system" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["bad.pt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("place", ["source", "destination"])
def test_no_permission_is_an_input_output_error(
    place: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copied(DCP)(golden, tmp_path)
    (tmp_path / "closed").mkdir(mode=0o500)
    if place == "source":
        (source / "__0_0.distcp").chmod(0)
    target = tmp_path / ("closed/out" if place == "destination" else "out")
    assert main(["convert", str(source), str(target), "--to", "torch"]) == 6
    assert "permission denied" in capsys.readouterr().err


def test_a_file_above_the_size_limit_is_a_capacity_error_and_leaves_nothing(
    golden: Path, tmp_path: Path, repo_dir: Path
) -> None:
    command = (
        f"ulimit -f 16; exec {sys.executable} -m ckpt_cli convert {golden / DCP} "
        f"{tmp_path / 'out'} --to torch"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=repo_dir, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "\n  hint: raise the limit on file sizes (ulimit -f unlimited)" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["model.gguf", "model.nemo", "model.h5", "model.msgpack", "model.onnx"]
)
def test_formats_that_are_not_read_are_refused_as_unsupported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"some bytes of it")
    for path in (tmp_path, tmp_path / name):
        assert main(["inspect", str(path)]) == 4
        assert capsys.readouterr().err.startswith("error: ")
