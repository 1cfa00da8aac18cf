"""``--explain --map KEY`` of ``ckpt reshard`` and ``ckpt convert``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_cli.app import main

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
RESHARD = ("--tp-new", "4", "--pp-new", "1", "--explain")


def test_a_tensor_is_drawn_before_and_after(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = tmp_path / "out"
    assert main(["reshard", str(golden / RANKS), str(dst), *RESHARD, "--map", FC2]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == FC2
    assert "bfloat16 [64, 96], 12.0 KiB: cut along axis 1 into 2 boxes" in lines
    assert "bfloat16 [64, 96], 12.0 KiB: cut along axis 1 into 4 boxes" in lines
    assert lines[-1] == "1 tp1 pp0  →  3 tp3 pp0  3.00 KiB"
    assert not dst.exists()


def test_moves_as_json_add_up_to_the_boxes(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(golden / RANKS), str(tmp_path / "out"), *RESHARD]
    assert main(["reshard", *words, "--map", "decoder.layers.*", "--json"]) == 0
    maps = json.loads(capsys.readouterr().out)["maps"]
    assert FC2 in [entry["key"] for entry in maps]
    for entry in maps:
        filled = [0] * len(entry["target"]["boxes"])
        for move in entry["moves"]:
            filled[move["target"]] += move["bytes"]
        assert filled == [box["bytes"] for box in entry["target"]["boxes"]]


def test_a_conversion_without_layout_rules_has_maps(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(golden / "torch_dcp/fsdp2_dp4"), str(tmp_path / "out.safetensors"), "--no-optim"]
    assert main(["convert", *words, "--explain", "--map", "*.layers.*.weight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("source") == lines.count("target") == 4
    assert "0 __0_0.distcp  →  0 out.safetensors" in " ".join(lines)
    assert lines[-1].endswith("more tensors; --json lists all")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*RESHARD[:-1], "--map", FC2], "--map has no effect: only --explain draws tensors"),
        ([*RESHARD, "--map", "decoder.layers.0.mlp.linear_fc9.weight"], "did you mean decoder"),
        ([*RESHARD, "--map", "nothing"], "no tensor of the destination matches 'nothing'"),
    ],
)
def test_a_map_needs_explain_and_a_tensor(
    words: list[str], message: str, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", str(golden / RANKS), *words]) == 2
    assert message in capsys.readouterr().err
