"""What training scripts save gets its manifest afterwards, by ``ckpt manifest``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from core.checks.finding import Severity
from core.checks.level import Level
from core.dist_checkpointing.serialization import save
from core.dist_checkpointing.storage_writer import CkptStorageWriter
from core.fingerprint.definition import form_of, format_lanes
from core.fingerprint.kernel import products_in_numpy
from core.fingerprint.sums import FormSum
from core.manifest.inventory import read_inventory, write_inventory
from core.validate.run import validate
from tests.dist_checkpointing.sharded import part_of
from tests.dist_checkpointing.test_storage_writer import state_of


def _findings(path: Path) -> list[tuple[str, str]]:
    found = validate(path, level=Level.DEEP).findings
    return [
        (one.code, one.message)
        for one in found
        if one.severity > Severity.NOTE or one.code.startswith("CK8")
    ]


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_of_dist_checkpointing_save(tmp_path: Path, backend: str) -> None:
    save({"w": part_of("w", (4, 6)), "common": {"lr": 0.5}}, tmp_path, (backend, 1))
    made = read_inventory(tmp_path)
    assert made.fingerprints is not None and list(made.fingerprints) == ["w"]
    write_inventory(made)
    assert _findings(tmp_path) == []


@pytest.mark.parametrize("format", ["dcp", "zarr3", "safetensors"])
def test_of_a_storage_writer_strided_tensors_included(tmp_path: Path, format: str) -> None:
    state = state_of()
    dcp.save(state, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    made = read_inventory(tmp_path / "out")
    assert made.fingerprints is not None
    for name in ("w", "transposed", "part"):
        tensor = state["model"][name].contiguous()
        sum_ = FormSum(form_of(tuple(tensor.shape), 4), products_in_numpy)
        sum_.add_run(0, memoryview(tensor.numpy().tobytes()))
        assert made.fingerprints[f"model.{name}"].text == format_lanes(sum_.lanes), name
    write_inventory(made)
    assert _findings(tmp_path / "out") == []


def test_strided_tensors_that_torch_itself_wrote(tmp_path: Path) -> None:
    dcp.save(state_of(), checkpoint_id=tmp_path / "theirs")
    dcp.save(state_of(), storage_writer=CkptStorageWriter(tmp_path / "ours", "dcp"))
    assert (
        read_inventory(tmp_path / "theirs").fingerprints
        == read_inventory(tmp_path / "ours").fingerprints
    )
