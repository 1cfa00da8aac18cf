"""DCP that torch 2.13 wrote of torchao 0.18.0's tensors: their parts, and what they stand for.

``tests/golden/frameworks/quantized_states.py`` made the checkpoints, on two ranks with FSDP2.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Level
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.archives import unpacked


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return unpacked("quantized_states", tmp_path)


def converted(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    run(Job(src=source, dst=target, to="torch", fsync=False, **options))
    result: dict[str, Any] = torch.load(target, weights_only=False)
    return result


@pytest.mark.parametrize(("name", "block"), [("adamw8bit", 256), ("adamw4bit", 128)])
def test_states_of_two_ranks_are_joined_and_dequantized_as_torchao_does(
    name: str, block: int, golden: Path
) -> None:
    source = golden / "fsdp2" / name
    expected = torch.load(golden / "fsdp2" / f"{name}.pt")
    parts = converted(source, golden / "parts.pt")["optim"]["state"]["0.weight"]["exp_avg"]
    assert parts["shape"] == [128, 64]
    assert parts["scale"].shape == (128 * 64 // block,)
    wide = converted(source, golden / "wide.pt", dequantize_optim=True)
    states = wide["optim"]["state"]["0.weight"]
    assert expected.keys() == {"exp_avg", "exp_avg_sq"}
    for key, tensor in expected.items():
        assert torch.equal(states[key], tensor)
    # The parts of a file dequantize the same.
    again = converted(golden / "parts.pt", golden / "again.pt", dequantize_optim=True)
    assert torch.equal(again["optim"]["state"]["0.weight"]["exp_avg"], expected["exp_avg"])
    assert not validate(source, level=Level.DEEP).findings


def test_a_weight_in_one_item_is_dequantized_as_torchao_does(golden: Path) -> None:
    result = converted(golden / "torchao/int8_fp16.dcp", golden / "out.pt", dequantize="fp16")
    expected = torch.load(golden / "torchao/int8_fp16.wide.pt")
    assert torch.equal(result["model"]["0.weight"], expected)


def test_states_whose_chunks_are_not_rows_are_refused_by_name(golden: Path) -> None:
    """As tensor parallelism cuts them: the blocks are those of each chunk."""
    source = golden / "fsdp2" / "adamw8bit"
    metadata = pickle.loads((source / ".metadata").read_bytes())
    key = "optim.state.0.weight.exp_avg"
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size([64, 128])
    for number, chunk in enumerate(entry.chunks):
        chunk.offsets, chunk.sizes = torch.Size([0, 64 * number]), torch.Size([64, 64])
    storage = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            number = 0 if index.offset[0] == 0 else 1
            new = type(index)(key, torch.Size([0, 64 * number]), number)
            storage[new] = info
    metadata.storage_data = storage
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    opened = open_checkpoint(source)
    assert "split along an axis other than 0" in opened.catalog.refused[key]
    with pytest.raises(CheckpointingException, match="split along an axis other"):
        converted(source, golden / "out.pt")
