"""``ckpt prune``: the question, the exit codes, and what is printed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.options.short_help import SHORT_HELP
from ckpt_cli.screen.failure import Terminated


@pytest.fixture
def root(golden: Path, tmp_path: Path) -> Path:
    """A root with checkpoints 1 to 4 of a model without optimizer."""
    for number in (1, 2, 3, 4):
        target = tmp_path / f"run/checkpoint-{number}"
        shutil.copytree(golden / "hf/llama/safetensors_single", target)
    return tmp_path / "run"


def numbers(root: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in root.glob("checkpoint-*"))


def test_a_dry_run_shows_what_stays_and_why(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(root), "--keep-last", "2", "--keep-every", "2", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    words = [line.split() for line in out.splitlines()]
    assert words[0] == [str(root)]
    assert words[1][:2] == ["keep", "checkpoint-4"]
    assert "the newest valid iteration; one of the last 2; a multiple of 2" in out.splitlines()[1]
    assert words[4][:2] == ["remove", "checkpoint-1"]
    assert out.splitlines()[5:7] == [
        "  the data of the newest valid iteration was not read (--deep)",
        (
            "would remove 1 iteration and free 83.5 KiB with --deep or --trust-metadata; "
            "3 iterations stay"
        ),
    ]
    assert err == ""
    assert numbers(root) == [1, 2, 3, 4]


def test_without_a_terminal_yes_is_needed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["prune", str(root), "--keep-last", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: removing iterations requires confirmation, but stdin is not a terminal",
        "  hint: review the plan with --dry-run, then pass --yes",
    ]
    assert numbers(root) == [1, 2, 3, 4]
    assert main(["prune", str(root), "--keep-last", "1", "--yes", "--trust-metadata"]) == 0
    assert "removed 3 iterations, " in capsys.readouterr().out
    assert numbers(root) == [4]
    # Where nothing is removed, nothing needs confirmation.
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to remove: 1 iteration stays"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Interrupted(Terminal):
    def readline(self, size: int | None = -1) -> str:
        raise Terminated(signal.SIGINT)


def test_the_example_for_a_batch_job_works(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for title, line in SHORT_HELP["prune"].examples if "batch job" in title)
    words = line.removeprefix("ckpt ").replace("--keep-last 3", "--keep-last 1").split()
    assert main([str(root) if word == "run" else word for word in words]) == 0
    assert "removed" in capsys.readouterr().out


def test_the_options_that_the_refusal_names_are_on_the_short_help_page(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 2
    hint = capsys.readouterr().err.partition("hint:")[2]
    named = set(re.findall(r"--[a-z-]+", hint))
    assert {"--deep", "--trust-metadata"} <= named <= set(SHORT_HELP["prune"].options)


@pytest.mark.parametrize("option", ["--deep", "--trust-metadata"])
def test_nothing_is_asked_before_the_data_were_read(
    root: Path,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hint of the refusal names the options that lead on."""
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["prune", str(root), "--keep-last", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "the newest valid iteration, 4, was checked without reading its data" in err
    assert option in err
    assert numbers(root) == [1, 2, 3, 4]
    assert main(["prune", str(root), "--keep-last", "3", option]) == 0
    assert numbers(root) == [2, 3, 4]


@pytest.mark.parametrize(
    ("stdin", "code", "remaining", "last"),
    [
        (Terminal("n\n"), 0, [1, 2, 3, 4], "nothing was removed"),
        (Terminal(""), 0, [1, 2, 3, 4], "nothing was removed"),
        (Interrupted(), 130, [1, 2, 3, 4], "would remove 1 iteration"),
        (Terminal("y\n"), 0, [2, 3, 4], "removed 1 iteration"),
    ],
)
def test_on_a_terminal_it_asks(
    root: Path,
    stdin: Terminal,
    code: int,
    remaining: list[int],
    last: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["prune", str(root), "--keep-last", "3", "--deep"]) == code
    assert numbers(root) == remaining
    out, err = capsys.readouterr()
    assert out.splitlines()[4].split()[:2] == ["remove", "checkpoint-1"]
    assert out.splitlines()[-1].startswith(last)
    assert err.startswith("Remove 1 iteration (83.5 KiB)? [y/N] ")
    assert err.endswith("\ninterrupted: nothing was removed\n") == (code == 130)


def test_json_needs_yes_or_a_dry_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(root), "--keep-every", "3", "--json"]) == 2
    capsys.readouterr()
    assert main(["prune", str(root), "--keep-every", "3", "--json", "--yes", "--deep"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["level"], report["newest_valid"]) == (
        "ckpt.prune/1",
        "deep",
        4,
    )
    assert [row["iteration"] for row in report["kept"]] == [4, 3]
    assert [row["paths"] for row in report["removed"]] == [
        [f"{root}/checkpoint-2"],
        [f"{root}/checkpoint-1"],
    ]
    assert report["freed_bytes"] == sum(row["n_bytes"] for row in report["removed"])
    assert numbers(root) == [3, 4]


def test_without_a_valid_iteration_the_exit_code_is_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in root.glob("*/model.safetensors"):
        os.truncate(file, 100)
    assert main(["prune", str(root), "--keep-last", "1", "--yes", "--trust-metadata"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no iteration is known to be valid, so none is removed"
    assert numbers(root) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no option says which iterations to keep"),
        (["--keep-last", "0"], "'0' is not a whole number ≥ 1"),
        (["--keep-every", "x"], "'x' is not a whole number ≥ 1"),
    ],
)
def test_wrong_arguments(
    root: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(root), *arguments, "--yes", "--trust-metadata"]) == 2
    assert message in capsys.readouterr().err


def test_launch_refuses_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["launch", "--", "prune", str(root), "--keep-last", "1", "--yes", "--trust-metadata"])
        == 2
    )
    assert "which runs in one process" in capsys.readouterr().err
