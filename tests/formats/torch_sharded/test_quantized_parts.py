"""Files of each rank with tensors of torchao 0.18.0, written by torch 2.13 on four ranks.

``tests/golden/frameworks/quantized_ranks.py`` made them, with FSDP2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Level
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.archives import unpacked


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized_ranks")
    return unpacked("quantized_ranks", folder)


def converted(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    run(Job(src=source, dst=target, to="torch", fsync=False, **options))
    result: dict[str, Any] = torch.load(target, weights_only=False)
    return result


def test_states_of_all_ranks_are_joined_and_dequantized_as_torchao_does(
    files: Path, tmp_path: Path
) -> None:
    name = "adamw8bit_hsdp"
    parts = converted(files / name, tmp_path / "parts.pt")["optim"]["state"]["0.weight"]["exp_avg"]
    assert parts["shape"] == [128, 64]
    assert parts["scale"].shape == (128 * 64 // 256,)
    expected = torch.load(files / f"{name}.pt")
    for source in (files / name, tmp_path / "parts.pt"):
        target = tmp_path / f"wide_{source.name}.pt"
        states = converted(source, target, dequantize_optim=True)["optim"]["state"]["0.weight"]
        assert states.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(states[key], expected[key]) for key in expected)
    assert not validate(files / name, level=Level.DEEP).findings


def test_replicated_states_are_replicas_part_by_part(files: Path) -> None:
    catalog = open_checkpoint(files / "adamw8bit_hsdp").catalog
    for part, rows in (("codes", 128), ("scale", 32)):
        fragments = catalog.fragments(f"optim.state.0.weight.exp_avg.{part}")
        boxes = [(fragment.box.offset[0], fragment.box.shape[0]) for fragment in fragments]
        assert sorted(boxes) == sorted(2 * [(0, rows // 2), (rows // 2, rows // 2)])


def test_replicated_weights_are_dequantized_as_torchao_does(files: Path, tmp_path: Path) -> None:
    name = "float8_rep"
    result = converted(files / name, tmp_path / "out.pt", dequantize="bf16")
    assert torch.equal(result["model"]["0.weight"], torch.load(files / f"{name}.pt"))


def test_states_of_a_missing_rank_are_refused_by_name(files: Path, tmp_path: Path) -> None:
    for rank in (0, 2):
        name = f"train_rank_{rank}.pt"
        (tmp_path / name).write_bytes((files / "adamw8bit_hsdp" / name).read_bytes())
    opened = open_checkpoint(tmp_path)
    reason = opened.catalog.refused["optim.state.0.weight.exp_avg"]
    assert reason == "torchao OptimState8bit with incomplete chunks"
    with pytest.raises(CheckpointingException, match="incomplete"):
        run(Job(src=tmp_path, dst=tmp_path / "out.pt", to="torch", fsync=False))
