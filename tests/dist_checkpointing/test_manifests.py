"""Manifests of what training scripts save: by the save itself, or later by ``ckpt manifest``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.dist_checkpointing.serialization import save
from core.dist_checkpointing.storage_writer import CkptStorageWriter
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from core.engine.fingerprint.definition import form_of, format_lanes
from core.engine.fingerprint.kernel import products_in_numpy
from core.engine.fingerprint.sums import FormSum
from core.files.store import LocalStore
from core.files.walk import list_tree
from core.publish.manifest.file import MANIFEST, read_manifest
from core.publish.manifest.inventory import read_inventory, write_inventory
from core.verbs.checks.check import Level, Severity
from core.verbs.validate.run import validate
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import part_of
from tests.dist_checkpointing.test_storage_writer import state_of


def _findings(path: Path) -> list[tuple[str, str]]:
    findings = validate(path, level=Level.DEEP).findings
    return [
        (finding.code, finding.message)
        for finding in findings
        if finding.severity > Severity.NOTE or finding.code.startswith("CK8")
    ]


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_of_dist_checkpointing_save(tmp_path: Path, backend: str) -> None:
    save({"w": part_of("w", (4, 6)), "common": {"lr": 0.5}}, tmp_path, (backend, 1))
    inventory = read_inventory(tmp_path)
    assert inventory.fingerprints is not None and list(inventory.fingerprints) == ["w"]
    write_inventory(inventory)
    assert _findings(tmp_path) == []


@pytest.mark.parametrize("format", ["dcp", "zarr3", "safetensors"])
def test_of_a_storage_writer_strided_tensors_included(tmp_path: Path, format: str) -> None:
    state = state_of()
    dcp.save(state, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    inventory = read_inventory(tmp_path / "out")
    assert inventory.fingerprints is not None
    for name in ("w", "transposed", "part"):
        tensor = state["model"][name].contiguous()
        sum_ = FormSum(form_of(tuple(tensor.shape), 4), products_in_numpy)
        sum_.add_run(0, memoryview(tensor.numpy().tobytes()))
        assert inventory.fingerprints[f"model.{name}"].text == format_lanes(sum_.lanes), name
    write_inventory(inventory)
    assert _findings(tmp_path / "out") == []


def test_strided_tensors_that_torch_itself_wrote(tmp_path: Path) -> None:
    dcp.save(state_of(), checkpoint_id=tmp_path / "theirs")
    dcp.save(state_of(), storage_writer=CkptStorageWriter(tmp_path / "ours", "dcp"))
    assert (
        read_inventory(tmp_path / "theirs").fingerprints
        == read_inventory(tmp_path / "ours").fingerprints
    )


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_save_writes_the_manifest_itself(tmp_path: Path, backend: str) -> None:
    state = {"w": part_of("w", (4, 6)), "common": {"lr": 0.5}}
    save(state, tmp_path, (backend, 1), manifest=True)
    recorded = read_manifest(LocalStore(tmp_path))
    files = {path for path in list_tree(tmp_path).files if path != MANIFEST}
    assert {file.path for file in recorded.files} == files
    # The same sums as those of ``ckpt manifest``, which reads the files.
    read_back = read_inventory(tmp_path, fingerprints=False)
    assert {file.path: file.crc for file in recorded.files} == {
        file.path: file.crc for file in read_back.files
    }
    assert {(array.file, array.offset, array.digest) for array in recorded.arrays} == {
        (array.file, array.offset, array.digest) for array in read_back.arrays
    }
    assert _findings(tmp_path) == []


def test_a_byte_that_changes_after_the_save_is_found(tmp_path: Path) -> None:
    save({"w": part_of("w", (4, 6))}, tmp_path, manifest=True)
    (entry,) = read_manifest(LocalStore(tmp_path)).arrays
    with open(tmp_path / entry.file, "r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff")
    assert "CK806" in [code for code, _ in _findings(tmp_path)]


def _save_with_manifest(rank: int, world: int, root: str) -> None:
    parts = {
        "grid": part_of("grid", (8, 4), (0, rank, world)),
        "replica": part_of("replica", (6,), replica_id=rank),
    }
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    save(parts, root, saver, manifest=True)


@pytest.mark.dist
def test_the_ranks_sums_form_one_manifest(tmp_path: Path) -> None:
    run_ranks(2, _save_with_manifest, str(tmp_path))
    recorded = read_manifest(LocalStore(tmp_path))
    assert {array.key for array in recorded.arrays} == {"grid", "replica"}
    assert recorded.files and all(file.crc is not None for file in recorded.files)
    assert _findings(tmp_path) == []
    assert not (tmp_path / ".ckpt-stage").exists()


def test_an_asynchronous_save_has_its_manifest_when_it_is_finalized(tmp_path: Path) -> None:
    calls = AsyncCallsQueue()
    request = save({"w": part_of("w", (4, 6))}, tmp_path, async_sharded_save=True, manifest=True)
    assert request is not None
    calls.schedule_async_request(request)
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    assert [array.key for array in read_manifest(LocalStore(tmp_path)).arrays] == ["w"]
    assert _findings(tmp_path) == []
    calls.close()


@pytest.mark.parametrize("format", ["dcp", "torch_dist", "zarr3", "safetensors"])
def test_a_storage_writer_writes_the_manifest_itself(tmp_path: Path, format: str) -> None:
    writer = CkptStorageWriter(tmp_path / "out", format, manifest=True)
    dcp.save(state_of(), storage_writer=writer)
    recorded = read_manifest(LocalStore(tmp_path / "out"))
    files = {path for path in list_tree(tmp_path / "out").files if path != MANIFEST}
    assert {file.path for file in recorded.files} == files
    assert recorded.arrays and all(array.digest for array in recorded.arrays)
    assert _findings(tmp_path / "out") == []


def test_the_manifest_of_a_single_file_is_next_to_it(tmp_path: Path) -> None:
    writer = CkptStorageWriter(tmp_path / "out.safetensors", "safetensors", manifest=True)
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer)
    assert sorted(os.listdir(tmp_path)) == [
        "out.safetensors",
        f"out.safetensors.{MANIFEST}",
    ]
    assert _findings(tmp_path / "out.safetensors") == []
