"""Optimizers other than Adam under ZeRO, saved by DeepSpeed 0.19.8 on two ranks.

``tests/golden/frameworks/deepspeed_optimizers.py`` made the checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job, Report
from core.verbs.convert.run import run
from tests.formats.deepspeed.deepspeed_samples import MODEL, Zero
from tests.support.archives import unpacked

MOMENTUM = ".momentum_buffer"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed_optimizers")
    return unpacked("deepspeed_optimizers", folder)


def converted(source: Path, target: Path) -> tuple[Report, dict[str, Any]]:
    report = run(Job(src=source, dst=target, to="torch", fsync=False))
    return report, torch.load(target, weights_only=False)


@pytest.mark.parametrize("name", ["sgd1", "sgd2"])
def test_momenta_of_sgd_are_those_of_the_live_engine(
    name: str, files: Path, tmp_path: Path
) -> None:
    _, result = converted(files / name, tmp_path / "out.pt")
    states = result["optimizer"]["state"]
    for key, expected in torch.load(files / f"{name}.pt").items():
        parameter, is_momentum, _ = key.partition(MOMENTUM)
        tensor = states[parameter]["momentum_buffer"] if is_momentum else result[parameter]
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", ["bnb1", "bnb2"])
def test_states_of_8_bits_are_dropped_by_name(name: str, files: Path, tmp_path: Path) -> None:
    """They were taken for one value, that of rank 0, of each parameter."""
    report, result = converted(files / name, tmp_path / "out.pt")
    (line,) = (line for line in report.dropped if "optimizer state" in line)
    assert "8-bit bitsandbytes states" in line
    assert all(states.keys() == {"step"} for states in result["optimizer"]["state"].values())
    if name == "bnb1":
        expected = torch.load(files / "bnb1.pt")
        assert all(torch.equal(result[key], tensor) for key, tensor in expected.items())


def test_states_of_8_bits_without_a_mapping_are_dropped_by_name(tmp_path: Path) -> None:
    """As bitsandbytes before 0.49 has them, next to each other."""

    def quantized(name: str, content: dict[str, Any]) -> None:
        if name != MODEL:
            for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                for number, moment in ("1", "exp_avg"), ("2", "exp_avg_sq"):
                    state[f"state{number}"] = state.pop(moment).to(torch.uint8)
                    state[f"absmax{number}"] = torch.ones(3)
                    state[f"qmap{number}"] = torch.ones(256)

    catalog = open_checkpoint(Zero(2, 2).write(tmp_path / "old", quantized)).catalog
    lines = [line for line in map(str, catalog.dropped) if "8-bit bitsandbytes states" in line]
    assert len(lines) == len(catalog.dropped) == 12
    states = [key for key in catalog.tensors if key.startswith("optimizer.state.")]
    assert states and all(key.endswith(".step") for key in states)
