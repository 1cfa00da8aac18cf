"""What commands show while they run, and what they say when they are interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.commands import manifest as manifest_command
from ckpt_cli.commands import transfer as transfer_command
from core.progress import OnProgress, Phase, Progress
from core.publish.stage.folder_lock import stage_dir_of

SOURCE = "mcore_legacy/dense_gqa/tp2_pp2_optim"

SLOW = """
import sys, time
from core.files.store import LocalStore
from core.publish.stage.files import StageStore

def slowed(function, pause_s):
    def slow(*arguments):
        time.sleep(pause_s)
        return function(*arguments)
    return slow

LocalStore.read_into = slowed(LocalStore.read_into, 0.02)
LocalStore.read_vector = slowed(LocalStore.read_vector, 0.02)
StageStore.sync = slowed(StageStore.sync, 0.2)
import rich.console, rich.progress  # else the bar may come too late on a busy machine
from ckpt_cli.workers import progress
progress._SHORT_S = progress._BAR_AFTER_S = 0.01
from ckpt_cli.app import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs ``ckpt`` with a slow source and a slow disk."""


def slow_command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", SLOW, *map(str, arguments)]


def environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name != "CKPT_PROGRESS"}


def test_in_a_pipe_every_phase_has_a_line_and_stdout_is_json(
    golden: Path, tmp_path: Path, repo_dir: Path
) -> None:
    words = ["convert", golden / SOURCE, tmp_path / "out", "--to", "dcp", "--verify", "--json"]
    done = subprocess.run(
        slow_command(*words, "--progress", "log"),
        cwd=repo_dir,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["schema"] == "ckpt.transfer/1"
    phases = ["planning", "copying", "syncing", "verifying", "syncing", "publishing"]
    lines = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == phases
    assert re.fullmatch(r"copying: \S+ \w+ of \S+ MiB \(\d+ %\).*", lines[1])


def test_on_a_terminal_the_bar_names_the_phase_and_leaves_nothing(
    golden: Path, tmp_path: Path, repo_dir: Path
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        slow_command("convert", golden / SOURCE, tmp_path / "out", "--to", "dcp"),
        cwd=repo_dir,
        env=environment() | {"COLUMNS": "100", "TERM": "xterm", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    data = b""
    try:
        while part := os.read(ours, 4096):
            data += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0 and b"wrote" in out
    shown = data.decode()
    assert "copying" in shown and "syncing" in shown
    assert re.search(r"\d+%  \S+ \w+ of \S+ MiB", shown)
    assert "MB" not in shown, "one system of units"
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        (("manifest", "{src}", "-o", "{dst}"), ["reading metadata", "checksumming", "publishing"]),
        (("validate", "{src}"), ["reading metadata", "checking"]),
        (("validate", "--deep", "{src}"), ["reading metadata", "checking"]),
        (("diff", "{src}", "{src}"), ["reading metadata", "comparing"]),
        (("convert", "{src}", "--to", "dcp", "-n"), ["planning"]),
        (
            ("reshard", "{src}", "{dst}", "--tp-new", "1", "--fingerprint"),
            ["planning", "copying", "fingerprinting", "syncing", "publishing"],
        ),
    ],
)
def test_every_command_tells_its_phases(
    golden: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    phases: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = {"src": golden / SOURCE, "dst": tmp_path / "out"}
    assert main([*(word.format(**names) for word in words), "--progress", "log"]) == 0
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == phases


def test_quiet_commands_show_none_unless_they_are_told_to(
    golden: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_PROGRESS", "log")
    words = ["validate", str(golden / SOURCE)]
    assert main([*words, "-q"]) == 0
    assert capfd.readouterr().err == ""
    assert main([*words, "-q", "--progress", "log"]) == 0
    assert capfd.readouterr().err.startswith("reading metadata")
    assert main(words) == 0
    assert capfd.readouterr().err.startswith("reading metadata")


def test_a_form_that_does_not_exist_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--progress", "dots"]) == 2
    assert "'dots' is not one of: auto, bar, log, none" in capfd.readouterr().err


def interrupted_in(phase: Phase, module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGINT to this process when the phase begins."""
    is_sent: list[Phase] = []

    def report(progress: Progress) -> None:
        if progress.phase == phase and not is_sent:
            is_sent.append(phase)
            os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def show(form: str) -> Iterator[OnProgress | None]:
        yield report

    monkeypatch.setattr(module, "show_progress", show)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [(), ("--resume",), ("--force",)])
@pytest.mark.parametrize(
    "phase",
    [Phase.PLANNING, Phase.COPYING, Phase.VERIFYING, Phase.SYNCING, Phase.PUBLISHING],
)
def test_an_interruption_tells_what_remains(
    golden: Path,
    tmp_path: Path,
    phase: Phase,
    options: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dst = tmp_path / "out"
    if options == ("--force",):
        shutil.copytree(golden / "torch_dcp/tp2_only", dst)
    before = sorted(path.name for path in dst.rglob("*"))
    interrupted_in(phase, transfer_command, monkeypatch)
    words = ["convert", golden / SOURCE, dst, "--to", "dcp", "--verify", *options]
    assert main(list(map(str, words))) == 130
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("interrupted: ") and err.count("\n") == 1
    # What the line says is on the disk.
    assert (" the output is kept in" in err) == stage_dir_of(dst).exists()
    assert ("nothing was written" in err) != stage_dir_of(dst).exists()
    assert (f"{dst} is unchanged" in err) == dst.exists()
    assert ("rerun with --resume" in err) == (options != ("--resume",))
    assert sorted(path.name for path in dst.rglob("*")) == before


def test_an_interrupted_manifest_is_not_written(
    golden: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted_in(Phase.CHECKSUMMING, manifest_command, monkeypatch)
    path = tmp_path / "manifest.json"
    assert main(["manifest", str(golden / SOURCE), "-o", str(path), "--json"]) == 130
    out, err = capfd.readouterr()
    assert err == "interrupted: no manifest was written\n"
    assert json.loads(out)["error"]["message"] == "no manifest was written"
    assert not path.exists()
