"""A directory that is no checkpoint, but contains some, is listed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.pages.inspect_listing import listing_lines
from ckpt_cli.screen.terminal import Screen
from core.opening.listing import list_checkpoints


@pytest.fixture
def runs(golden: Path, tmp_path: Path) -> Path:
    """Two runs, one of them with two iterations, and what is to be skipped."""
    folder = tmp_path / "my runs"
    ranks = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    shutil.copytree(ranks, folder / "a")
    shutil.copytree(ranks / "iter_0000010", folder / "a" / "iter_0000020")
    shutil.copytree(golden / "hf/llama/safetensors_single", folder / "b")
    shutil.copytree(folder / "b", folder / ".hidden")
    (folder / "logs").mkdir()
    (folder / "logs/events").write_text("")
    for number, name in enumerate(("b", "a/iter_0000010", "a/iter_0000020")):
        for path in (folder / name).rglob("*"):
            os.utime(path, (1_700_000_000 + number,) * 2)
    return folder


def test_checkpoints_below_are_listed_the_newest_first(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(runs), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["schema"] == "ckpt.inspect-list/1"
    assert page["path"] == str(runs)
    rows = [
        (os.path.relpath(item["path"], runs), item["format"], item["iteration"])
        for item in page["checkpoints"]
    ]
    assert rows == [
        ("a/iter_0000020", "megatron", 20),
        ("a/iter_0000010", "megatron", 10),
        ("b", "safetensors", None),
    ]
    sizes = [path.stat().st_size for path in (runs / "b").iterdir()]
    assert page["checkpoints"][2]["bytes"] == sum(sizes)
    assert page["checkpoints"][2]["files"] == len(sizes)
    assert page["checkpoints"][2]["modified"] == "2023-11-14T22:13:20+00:00"


def test_each_line_has_the_command_that_shows_it(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{runs}: not a checkpoint, but it contains 3 checkpoints"
    assert f"ckpt inspect '{runs}/a/iter_0000020'" in lines[3]
    assert main(["inspect", str(runs), "--limit", "1"]) == 0
    assert capsys.readouterr().out.endswith("… 2 more checkpoints; --limit 0 shows all\n")


def test_a_key_needs_a_checkpoint(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(runs), "model.*"]) == 4
    assert main(["convert", str(runs), str(runs / "out"), "--to", "dcp"]) == 4
    assert "it contains checkpoints" in capsys.readouterr().err


def test_loose_files_are_listed(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(golden / "hf/llama/torch_single"), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert {item["format"] for item in page["checkpoints"]} == {"torch"}
    assert len(page["checkpoints"]) > 1


def test_a_command_that_does_not_fit_has_a_line_of_its_own(runs: Path) -> None:
    listing = list_checkpoints(runs)
    narrow = list(listing_lines(Screen(width=80), runs, listing, limit=0))
    assert f"    ckpt inspect '{runs}/b'" in "\n".join(narrow).splitlines()
    wide = list(listing_lines(Screen(width=300), runs, listing, limit=0))
    assert len("\n".join(wide).splitlines()) == 3 + len(listing.checkpoints)


def test_a_trainers_checkpoint_and_the_directory_inside_are_one(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden / "trainer"), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    paths = [os.path.relpath(item["path"], golden / "trainer") for item in page["checkpoints"]]
    assert sorted(paths) == [
        "peft/checkpoint-2",
        "zero2_dp2/checkpoint-1",
        "zero2_dp2/checkpoint-2",
        "zero3_dp2/checkpoint-2",
    ]


def test_validate_lists_them_as_well(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(runs)]) == 1
    out = capsys.readouterr().out
    assert "CK100" in out
    assert out.index(f"ckpt validate '{runs}/a/iter_0000020'") < out.index(
        f"ckpt validate '{runs}/a/iter_0000010'"
    )
    assert main(["validate", str(runs), "--json"]) == 1
    json.loads(capsys.readouterr().out)


def test_options_for_iterations_name_the_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--newest-valid", str(runs)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"ckpt validate --newest-valid '{runs}/a'" in err
    assert main(["validate", "--newest-valid", "-q", str(runs)]) == 1
    assert "--newest-valid" not in capsys.readouterr().err
    assert main(["validate", "--all-iterations", str(runs)]) == 2
    assert f"the newest iteration is in '{runs}/a'" in capsys.readouterr().err


def test_checkpoints_are_found_at_any_depth(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a shared disk: user, project, date, run, and many iterations in one of the runs."""
    run = tmp_path / "disk/user/project/2026-11/28/run"
    for number in range(53):
        shutil.copytree(golden / "hf/llama/safetensors_single", run / f"checkpoint-{number}")
    shutil.copytree(golden / "torch_dcp/tp2_only", tmp_path / "disk/other/x/y/z/dcp")
    assert main(["inspect", str(tmp_path / "disk"), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["rest"] is None
    paths = {os.path.relpath(item["path"], tmp_path / "disk") for item in page["checkpoints"]}
    assert paths == {
        *(f"user/project/2026-11/28/run/checkpoint-{number}" for number in range(53)),
        "other/x/y/z/dcp",
    }


@pytest.mark.long
def test_a_search_that_stops_says_where(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / "torch_dcp/tp2_only", tmp_path / "disk/a")
    for number in range(10_010):
        (tmp_path / f"disk/b/{number}").mkdir(parents=True)
    assert main(["inspect", str(tmp_path / "disk")]) == 0
    out = capsys.readouterr().out
    assert "it contains 1 checkpoint" in out
    assert "the search stopped after " in out
    assert "more were not searched, starting with b/" in out
    shutil.rmtree(tmp_path / "disk/a")
    assert main(["inspect", str(tmp_path / "disk")]) == 4
    assert (
        "no subdirectory with one was found; the search stopped after " in capsys.readouterr().err
    )


def test_a_training_root_shows_its_iterations(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a/iter_0000030").mkdir()
    assert main(["inspect", str(runs / "a"), "--iteration", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("iteration  modified"))
    rows = lines[at + 1 : at + 4]
    assert [row.split()[0] for row in rows] == ["30", "20", "10"]
    assert rows[0].endswith("0 B      0  incomplete, or not a checkpoint")
    assert rows[2].endswith("4  ← this one")
    assert main(["inspect", str(runs / "a"), "--iteration", "10", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["iterations"]
    assert [(item["iteration"], item["format"], item["files"]) for item in listed] == [
        (30, None, 0),
        (20, "megatron", 4),
        (10, "megatron", 4),
    ]
    # One iteration needs no list.
    assert main(["inspect", str(runs / "a/iter_0000010"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iterations"] == []


def test_a_directory_without_any_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a/b/c/d/e").mkdir(parents=True)
    (tmp_path / "a/latest").write_text("global_step10")
    assert main(["inspect", str(tmp_path)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: not a checkpoint, and no checkpoint was found below")
