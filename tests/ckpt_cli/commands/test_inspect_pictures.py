"""``ckpt inspect --sizes`` and ``--ranks``, ``--stats`` of a KEY, and the grid of ``validate``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from tests.support.edited import copied

Run = Callable[..., str]
LEGACY = "mcore_legacy/dense_gqa/tp2_pp2_vpp2"


def test_ranks_are_drawn_as_a_grid(run: Run, golden: Path) -> None:
    lines = run(golden / LEGACY, "--ranks").splitlines()
    assert lines[2] == "TP 2 · PP 2 · VPP 2: 4 ranks, 339 KiB"
    assert lines[-2:] == [
        "pp 0  0, 2    84.8 KiB  84.8 KiB  embedding",
        "pp 1  1, 3    84.9 KiB  84.9 KiB  final_layernorm, output_layer",
    ]


def test_sizes_have_a_bar_for_each_module(run: Run, golden: Path) -> None:
    text = run(golden / "mcore_torch_dist/dense_gqa/tp2_pp2_optim", "--sizes")
    names = [line[:38].rstrip() for line in text.splitlines()]
    assert "model" in names
    assert "  decoder" in names
    assert "optimizer" in names
    assert "  exp_avg_sq (as exp_avg)" in names
    assert "40 tensors, 2.31 MiB" in text


def test_both_pictures_and_their_json(run: Run, shown: Callable[..., Any], golden: Path) -> None:
    text = run(golden / LEGACY, "--sizes", "--ranks")
    assert text.index("model ") < text.index("TP 2")
    page = shown(golden / LEGACY, "--sizes", "--ranks")
    assert page["sizes"]["model"]["bytes"] == page["totals"]["bytes"]
    assert page["rank_grid"]["vpp"] == 2
    assert [cell["layers"] for cell in page["rank_grid"]["cells"]] == ["0, 2"] * 2 + ["1, 3"] * 2
    assert "sizes" not in shown(golden / LEGACY)


@pytest.mark.parametrize("flag", ["--sizes", "--ranks"])
@pytest.mark.parametrize("other", [["embedding*"], ["--stats"], ["--flat"], ["--optim"]])
def test_pictures_of_the_checkpoint_take_no_key(
    flag: str, other: list[str], golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden / LEGACY), *other, flag]) == 2
    assert f"{flag} shows the complete checkpoint" in capsys.readouterr().err


def test_ranks_of_a_checkpoint_without_ranks_are_refused(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden / "hf/llama/safetensors_sharded"), "--ranks"]) == 2
    assert "--ranks needs a checkpoint with a Megatron rank layout" in capsys.readouterr().err


def test_stats_of_a_key_have_a_histogram_for_each_layer(
    run: Run, shown: Callable[..., Any], golden: Path
) -> None:
    key = "decoder.layers.*.linear_fc1.weight"
    lines = run(golden / LEGACY, key, "--stats", "--progress", "none").splitlines()
    layers = [line for line in lines if line.startswith("    layers.")]
    assert [line.split()[0] for line in layers] == [f"layers.{n}" for n in range(4)]
    assert all("█" in line for line in layers)
    for tensor in shown(golden / LEGACY, key, "--stats", "--progress", "none")["tensors"]:
        stats = tensor["stats"]
        counts = [n for side in stats["histogram"].values() for n in side.values()]
        assert sum(counts) + stats["zeros"] == tensor["bytes"] // 2


def test_validate_draws_the_grid_where_a_rank_is_missing(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(golden, LEGACY, tmp_path)
    assert main(["validate", str(path)]) == 0
    assert "pp 0" not in capsys.readouterr().out
    shutil.rmtree(path / "mp_rank_01_001")
    assert main(["validate", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "pp 1  1, 3    84.9 KiB   missing  final_layernorm, output_layer" in lines
    assert lines[-3:] == ["missing: tp 1 pp 1, with layers 1, 3", "", "→ ckpt explain CK160"]
    # Reports for other programs have no picture, and --quiet has none either.
    assert main(["validate", str(path), "--json"]) == 1
    json.loads(capsys.readouterr().out)
    assert main(["validate", str(path), "--quiet"]) == 1
    assert "pp 1" not in capsys.readouterr().out


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def test_a_map_draws_the_boxes_of_a_tensor(run: Run, golden: Path) -> None:
    lines = run(golden / LEGACY, FC1, "--map").splitlines()
    assert lines[0] == FC1
    assert lines[1] == "bfloat16 [192, 64], 24.0 KiB: cut along axis 0 into 4 boxes"
    assert lines[-1].split()[0] == "3"
    assert lines[-1].endswith("tp1 pp0  mp_rank_01_000/model_optim_rng.pt")


def test_maps_of_a_pattern_are_a_few(run: Run, golden: Path) -> None:
    text = run(golden / LEGACY, "decoder.layers.*.weight", "--map")
    assert text.count("down: ") + text.count("across: ") > 4
    assert text.splitlines()[-1].endswith("more tensors; --limit 0 draws all")
    complete = run(golden / LEGACY, "decoder.layers.*.weight", "--map", "--limit", "0")
    assert "more tensors" not in complete


def test_a_map_as_json_lists_all_boxes(shown: Callable[..., Any], golden: Path) -> None:
    (tensor,) = shown(golden / LEGACY, FC1, "--map")["tensors"]
    assert tensor["map"]["cut_axes"] == [0]
    assert [box["offset"] for box in tensor["map"]["boxes"]] == [[0, 0], [48, 0], [96, 0], [144, 0]]
    assert tensor["map"]["boxes"][1]["ranks"] == ["tp1 pp0"]
    assert "map" not in shown(golden / LEGACY, FC1)["tensors"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--map requires a tensor's KEY"),
        (["args.hidden_size"], "--map needs tensors, but KEY selects only objects"),
        ([FC1, "--ranks"], "--map cannot be combined with --ranks"),
        ([FC1, "--values", "4"], "--map cannot be combined with --values"),
        (["decoder.layers.0.mlp.linear_fc9.weight"], "did you mean"),
    ],
)
def test_a_map_needs_a_tensor_and_room(
    words: list[str], message: str, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden / LEGACY), *words, "--map"]) == 2
    assert message in capsys.readouterr().err
