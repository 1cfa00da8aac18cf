"""A path that does not exist is corrected if a similar one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.errors import UsageError
from core.opening.open import open_checkpoint
from core.verbs.validate.newest import iteration_paths


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs/llama/iter_0000010").mkdir(parents=True)
    (tmp_path / "runs/.llamb").mkdir()
    (tmp_path / "runs/gpt").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def hint_of(path: str) -> str | None:
    with pytest.raises(UsageError, match="no such file or directory") as refusal:
        open_checkpoint(Path(path))
    return refusal.value.hint


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("runs/lama", "runs/llama"),
        ("run/llama", "runs/llama"),
        ("rums", "runs"),
        ("runs/lama/iter_0000010", "runs/llama/iter_0000010"),
        ("runs/lama/iter_0000099", "runs/llama"),
        ("runs/llama/iter_000010", "runs/llama/iter_0000010"),
    ],
)
def test_a_similar_path_is_suggested(wrong: str, right: str, runs: Path) -> None:
    assert hint_of(wrong) == f"did you mean {right}?"
    assert hint_of(str(runs.parent / wrong)) == f"did you mean {runs.parent / right}?"


def test_without_a_similar_path_the_hub_is_named(runs: Path) -> None:
    assert hint_of("runs/xyz") == "check the spelling of the path"
    assert "hf download meta/some-model" in str(hint_of("meta/some-model"))


def test_a_stream_is_to_be_saved_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("-", str(tmp_path / "pipe"), "/dev/null"):
        for command in ("inspect", "validate", "manifest"):
            assert main([command, path]) == 2
            assert "  hint: save the stream to a file first" in capsys.readouterr().err


def test_training_roots_too(runs: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        iteration_paths(runs / "lama")
    assert refusal.value.hint == f"did you mean {runs / 'llama'}?"
    (runs / "file").touch()
    with pytest.raises(UsageError) as refusal:
        iteration_paths(runs / "file")
    assert refusal.value.hint == "check the spelling of the path"
