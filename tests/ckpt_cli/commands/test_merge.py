"""``ckpt merge``: options, report and refusals, as people and programs see them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import core
from ckpt_cli.app import main
from core.errors import UnsupportedError, UsageError


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of one weight: 1 2 3 and 2 4 6."""
    paths = (tmp_path / "a", tmp_path / "b")
    for factor, path in enumerate(paths, 1):
        path.mkdir()
        save_file({"w": torch.tensor([1.0, 2.0, 3.0]) * factor}, path / "model.safetensors")
    return paths


def weight(path: Path) -> list[float]:
    """The weight of a model."""
    values: list[float] = load_file(path / "model.safetensors")["w"].tolist()
    return values


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("{a} {b} --average", [1.5, 3.0, 4.5]),
        ("{a} {b} --weights 0.25,0.75", [1.75, 3.5, 5.25]),
        ("{a} {b} --ema 0.5", [1.5, 3.0, 4.5]),
        ("{b} {a} --delta", [1.0, 2.0, 3.0]),
        ("{a} --add-delta {b} --scale 0.5", [2.0, 4.0, 6.0]),
        ("{a} --add_delta {b} --add-delta {b}", [5.0, 10.0, 15.0]),
        ("{a} {b} --slerp 0.5", [1.5, 3.0, 4.5]),  # parallel: no angle
    ],
)
def test_every_method_is_an_option(
    words: str, values: list[float], sources: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = sources
    out = tmp_path / "out"
    assert main(["merge", *words.format(a=a, b=b).split(), "-o", str(out), "--quiet"]) == 0
    assert weight(out) == values


def test_the_report_and_the_plan_name_all_sources(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, sources)
    words = ["merge", a, b, "--average", "-o", str(tmp_path / "out"), "--json"]
    assert main([*words, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["schema"] == "ckpt.plan/1"
    assert f"average of {a}, {b}" in plan["notes"]
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["src"]) == ("ckpt.transfer/1", a)
    assert f"the configuration, arguments and all other entries come from {a}" in report["notes"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("{a} {b} -o out", "no merge method was chosen", "choose one of: --average"),
        ("{a} -o out", "no merge method was chosen", "ckpt reshard SRC DST --tp-new 1"),
        ("{a} {b} --average", "the destination is missing", "-o DST"),
        ("{a} {b} --average --ema 0.9 -o out", "--average and --ema cannot be combined", ""),
        ("{a} {b} --weights 1,x -o out", "'1,x' is not a list of numbers", "0.5,0.3,0.2"),
        ("{a} {b} --weights 1,1 -o out", "--weights sum to 2 instead of 1", "0.5,0.5"),
        ("{a} {b} --ema 2 -o out", "--ema: 2.0 is not a number between 0 and 1", ""),
        (
            "{a} {b} --add-delta {b} -o out",
            "--add-delta accepts only one SRC, but 2 were specified",
            "",
        ),
        (
            "{a} {b} --average --scale 2 -o out",
            "--scale has no effect: it applies only to --add-delta",
            "",
        ),
        ("{a} --average -o out", "at least two checkpoints, but only one was specified", "A B"),
        ("{a} {a}/none --average -o out", "a/none", ""),
        ("{a} --lora {b} -o out", "it has no peft adapter_config.json", "save_pretrained"),
        ("{a} {b} --average --no-optim -o out", "--no-optim", ""),
    ],
)
def test_command_lines_that_make_no_sense_are_refused(
    words: str,
    message: str,
    hint: str,
    sources: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = sources
    assert main(["merge", *words.format(a=a, b=b).split()]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert hint in text
    assert not Path("out").exists()


def test_a_result_can_be_replaced_but_no_source(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = sources
    words = ["merge", str(a), str(b), "--average", "--quiet", "--force", "-o"]
    for _ in range(2):
        assert main([*words, str(tmp_path / "out")]) == 0
    for source in sources:
        assert main([*words, str(source)]) == 2
        assert str(source) in capsys.readouterr().err
        assert weight(source)


def test_the_state_of_the_runs_is_not_compared(golden: Path, tmp_path: Path) -> None:
    source = golden / "accelerate" / "plain"
    merged = core.merge([source] * 2, tmp_path / "weights", average=True, to="safetensors")
    assert any("scheduler" in line for line in merged.dropped)
    merged = core.merge([source] * 2, tmp_path / "all", average=True, to="dcp")
    # The first one's is carried; that of the others is listed.
    (line,) = [line for line in merged.dropped if "scheduler" in line]
    assert line.startswith("checkpoint_0: training state is not merged: ")


def test_objects_are_compared_by_their_content(tmp_path: Path) -> None:
    nan = float("nan")
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        state = {"w": torch.ones(2), "args": argparse.Namespace(size=value, scale=nan)}
        torch.save(state, tmp_path / f"{name}.pt")
    core.merge([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "out.pt", average=True)
    with pytest.raises(UnsupportedError, match="args of .*c.pt"):
        core.merge([tmp_path / "a.pt", tmp_path / "c.pt"], tmp_path / "no.pt", average=True)


def test_a_url_of_a_delta_is_not_a_local_path(
    sources: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["merge", str(sources[0]), "--add-delta", "ftp://host/delta", "-o", "out"]
    assert main(words) == 2
    assert "ftp://host/delta" in capsys.readouterr().err


def test_the_verb_of_python_does_the_same(sources: tuple[Path, Path], tmp_path: Path) -> None:
    report = core.merge(sources, tmp_path / "out", weights=[0.25, 0.75], verify=True)
    assert weight(tmp_path / "out") == [1.75, 3.5, 5.25]
    assert report.bytes_verified == 12
    core.merge([sources[1]], tmp_path / "sum", add_delta=[sources[0]], scale=2.0)
    assert weight(tmp_path / "sum") == [4.0, 8.0, 12.0]
    with pytest.raises(UsageError):
        core.merge([], tmp_path / "none", average=True)
