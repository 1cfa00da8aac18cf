"""The program seen from outside: pipes that close, full disks, encodings, terminals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shown_errors import is_one_error

COMMAND = [sys.executable, "-m", "ckpt_cli"]


def shell(line: str, repo_dir: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a bash line in which ``$CKPT`` is the program."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=repo_dir,
        env={**os.environ, "CKPT": " ".join(COMMAND), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", ["convert --help", "inspect {} --flat", "inspect {} --json"])
def test_a_reader_that_goes_away_ends_the_program_quietly(
    arguments: str, golden: Path, repo_dir: Path
) -> None:
    line = arguments.format(golden / "torch_dcp/fsdp2_dp4")
    done = shell(f"$CKPT {line} | true; exit ${{PIPESTATUS[0]}}", repo_dir)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_under_stdout_is_a_capacity_error(golden: Path, repo_dir: Path) -> None:
    done = shell(f"$CKPT inspect {golden / 'torch_dcp/tp2_only'} > /dev/full", repo_dir)
    assert done.returncode == 7
    assert done.stderr.startswith("error: no space left on device")
    assert is_one_error(done.stderr)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_nothing_but_the_output(closed: str, repo_dir: Path) -> None:
    done = shell(f"$CKPT inspect no/such/path --json {closed}", repo_dir)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if closed == "2>&-":
        assert json.loads(done.stdout)["error"]["code"] == "usage"


def test_an_ascii_stream_gets_ascii(golden: Path, repo_dir: Path) -> None:
    done = shell(
        f"$CKPT inspect {golden / 'torch_dcp/tp2_only'}",
        repo_dir,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "layers.[0-1]" in done.stdout
    assert "\\u" not in done.stdout


def in_a_terminal(*arguments: str, repo_dir: Path, columns: int, **environ: str) -> str:
    """What the program writes to a terminal of some width."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=repo_dir,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environ},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    pieces = []
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux: EIO when the last writer is gone
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(leader)
    assert process.wait() == 0
    return b"".join(pieces).decode()


@pytest.mark.parametrize("columns", [80, pytest.param(140, marks=pytest.mark.long)])
def test_a_terminal_gets_colors_and_wrapped_facts(
    columns: int, golden: Path, repo_dir: Path
) -> None:
    path = str(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    page = in_a_terminal("inspect", path, repo_dir=repo_dir, columns=columns, NO_COLOR="")
    assert "\x1b[" in page
    plain = in_a_terminal("inspect", path, repo_dir=repo_dir, columns=columns, NO_COLOR="1")
    assert "\x1b" not in plain
    lines = plain.splitlines()[1:]  # the first is the path
    assert max(map(len, lines)) <= columns
