"""Pickles in tensors of bytes, as Transformer Engine's extra states are: looked into by
``--deep``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import save_file

from core.verbs.checks.check import Level, Severity
from core.verbs.validate.run import validate
from tests.verbs.checks.test_other_files import Call

KEY = "decoder.layers.0.linear._extra_state"
STATE = {
    "recipe": None,
    "scale_fwd": torch.ones(3),
    "amax_history_fwd": torch.zeros(2, 3),
    "extra_fp8_variables": {},
}


def saved(state: object) -> bytes:
    """As Transformer Engine before 1.0 had it, and Megatron's BytesIO."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


STREAMS: dict[str, Callable[[object], bytes]] = {
    "pickled": pickle.dumps,
    "saved": saved,
    "text": lambda state: pickle.dumps(state, protocol=0),
}


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def torch_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def dcp_directory(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)


def safetensors_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def zarr_group(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Chunks of 100 bytes, compressed."""
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    for key, tensor in tensors.items():
        group.create_array(key, data=np.asarray(tensor), chunks=(100,))


WRITERS = (torch_file, dcp_directory, safetensors_file, zarr_group)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_call_in_a_tensor_of_bytes_is_found(
    write: Callable[[Path, dict[str, torch.Tensor]], None], stream: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    data = STREAMS[stream]({"filler": list(range(100)), "call": Call()})
    write(folder, {KEY: tensor_of(data), "w": torch.arange(3.0)})
    findings = [
        finding
        for finding in validate(folder, level=Level.DEEP).findings
        if finding.severity > Severity.NOTE
    ]
    assert [(finding.code, finding.key, finding.found) for finding in findings] == [
        ("CK601", KEY, findings[0].found)
    ]
    assert str(findings[0].found).endswith(".eval")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_states_of_transformer_engine_in_tensors_have_no_findings(
    write: Callable[[Path, dict[str, torch.Tensor]], None], stream: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {
        KEY: tensor_of(STREAMS[stream](STATE)),
        "empty._extra_state": torch.zeros(0, dtype=torch.uint8),
        "rng": torch.get_rng_state(),
    }
    if write in (safetensors_file, zarr_group):
        del tensors["empty._extra_state"]
    write(folder, tensors)
    findings = [
        finding
        for finding in validate(folder, level=Level.DEEP).findings
        if finding.severity > Severity.NOTE
    ]
    assert findings == []
