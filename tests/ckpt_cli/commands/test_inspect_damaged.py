"""Damaged checkpoints are shown as far as they can be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.pages.damage import damage_blocks
from ckpt_cli.screen.blocks import draw_text
from ckpt_cli.screen.terminal import Screen
from core.errors import CorruptError
from tests.support import broken as b
from tests.support.damages import DCP, ITER, RANKS, SHARDS, ZARR

OLDER = "mcore0121_torch_dist/dense_gqa/tp2_pp2"
BINS = "hf/llama/bin_sharded"
SECOND = "model-00002-of-00003.safetensors"
BIN = "pytorch_model-00002-of-00003.bin"
RANK = f"{ITER}/mp_rank_01_000/model_optim_rng.pt"
CHUNK = f"{ITER}/output_layer.weight/0.0"
DAMAGES = {
    "a missing shard": (SHARDS, SECOND, Path.unlink, SECOND),
    "a truncated shard": (SHARDS, SECOND, b.cut, SECOND),
    "a missing shard without an index": (
        SHARDS,
        "",
        lambda path: [(path / name).unlink() for name in ("model.safetensors.index.json", SECOND)],
        SECOND,
    ),
    "a truncated torch zip": (BINS, BIN, b.cut, BIN),
    "a missing torch zip": (BINS, BIN, Path.unlink, BIN),
    "a missing rank": (RANKS, RANK, Path.unlink, RANK[len(ITER) + 1 :]),
    "a truncated rank": (RANKS, RANK, b.cut, RANK[len(ITER) + 1 :]),
    "a missing data file": (DCP, "__1_0.distcp", Path.unlink, "__1_0.distcp"),
    "a truncated data file": (DCP, "__1_0.distcp", b.cut, "__1_0.distcp"),
    "a missing common state": (OLDER, f"{ITER}/common.pt", Path.unlink, None),
    "a missing chunk": (ZARR, CHUNK, Path.unlink, "output_layer.weight/0.0"),
    "a truncated chunk": (ZARR, CHUNK, b.cut, "output_layer.weight/0.0"),
}


@pytest.fixture
def damaged(golden: Path, tmp_path: Path) -> Callable[..., Path]:
    """Breaks a file of a writable copy of a golden checkpoint; returns the copy."""

    def call(source: str, file: str, breaks: Callable[[Path], object]) -> Path:
        path = tmp_path / "checkpoint"
        shutil.copytree(golden / source, path)
        breaks(path / file)
        return path

    return call


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_can_be_read_is_shown_below_the_damage(
    damage: str,
    golden: Path,
    damaged: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, file, breaks, named = DAMAGES[damage]
    assert main(["inspect", str(golden / source), "--json"]) == 0
    intact = json.loads(capsys.readouterr().out)
    assert intact["problems"] == []
    path = damaged(source, file, breaks)
    assert main(["inspect", str(path), "--json"]) == 3
    page = json.loads(capsys.readouterr().out)
    assert page["problems"]
    if named is not None:
        assert named in [problem.get("file") for problem in page["problems"]]
    assert 0 < len(page["tensors"]) <= len(intact["tensors"])
    assert [item["possible"] for item in page["can"]] == [False]
    # The page begins with the damage, and goes on as that of an intact checkpoint.
    assert main(["inspect", str(path)]) == 3
    out, err = capsys.readouterr()
    # Whoever reads standard error only is told, too, in one line.
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    first, second = out.splitlines()[:2]
    assert first.startswith("✗ damaged: ")
    assert second.startswith(f"  error  {named or ''}")
    assert "\nformat " in out


@pytest.mark.parametrize(
    ("source", "file", "breaks"),
    [
        (DCP, ".metadata", b.zeroed),
        (DCP, ".metadata", Path.unlink),
        ("hf/llama/safetensors_single", "model.safetensors", b.zeroed),
    ],
)
def test_nothing_to_show_is_the_error(
    source: str,
    file: str,
    breaks: Callable[[Path], object],
    damaged: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = damaged(source, file, breaks)
    assert main(["inspect", str(path), "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 3
    assert err.startswith("error: ")


def test_a_tensor_that_is_lost_is_explained(
    damaged: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(SHARDS, SECOND, Path.unlink)
    assert main(["inspect", str(path), "model.layers.1.input_layernorm.weight"]) == 2
    out, err = capsys.readouterr()
    assert SECOND in out and "no tensor or object matches" in err


def test_no_other_command_reads_a_part(damaged: Callable[..., Path], tmp_path: Path) -> None:
    path = damaged(SHARDS, SECOND, Path.unlink)
    assert main(["convert", str(path), str(tmp_path / "out.pt")]) == 3
    assert not (tmp_path / "out.pt").exists()


def test_damage_is_plain_ascii_where_the_terminal_has_no_other() -> None:
    blocks = damage_blocks([CorruptError("cut", file="a.pt")])
    lines = list(draw_text(Screen(80, has_unicode=False), blocks))
    assert lines[0] == "- damaged: 1 problem; below is what can be read"
    assert all(line.isascii() for line in lines)
