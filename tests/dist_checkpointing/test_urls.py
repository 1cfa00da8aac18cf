"""Training scripts read checkpoints from object stores, and save into them, as into directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.dist_checkpointing import (
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from core.dist_checkpointing.serialization import load_sharded_metadata
from core.dist_checkpointing.storage_reader import CkptStorageReader
from core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from core.errors import StorageError, UsageError
from core.files.remote_path import location_of
from tests.dist_checkpointing.ranks import run_ranks
from tests.support.object_stores import s3_server, upload

TORCH_DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp2"
FSDP = "torch_dcp/fsdp2_dp2"


@pytest.fixture(scope="module")
def s3(golden: Path) -> Iterator[Any]:
    """Returns a client of moto's S3, whose bucket ``runs`` holds three checkpoints."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="runs")
        for name in (TORCH_DIST, ZARR, FSDP):
            upload(client, golden / name, "runs", name)
        yield client


def store_environment() -> dict[str, str]:
    """The settings of the store, which ranks do not inherit from the server that forks them."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def iteration_of(folder: Path) -> str:
    """The directory below a training root, as a suffix of its path."""
    inner = sorted(folder.glob("iter_*"))
    return f"/{inner[0].name}" if inner else ""


def assert_same(a: Any, b: Any) -> None:
    """Raises unless two trees are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize("name", [TORCH_DIST, ZARR])
def test_the_functions_for_loading_take_a_url_for_a_directory(
    s3: Any, golden: Path, name: str
) -> None:
    inner = name + iteration_of(golden / name)
    folder, url = golden / inner, f"s3://runs/{inner}"
    assert check_is_distributed_checkpoint(url)
    assert check_is_distributed_checkpoint(location_of(url))
    assert check_is_distributed_checkpoint(Path(url))
    assert not check_is_distributed_checkpoint("s3://runs/missing")
    for function in (
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_tensors_metadata,
        load_sharded_metadata,
    ):
        assert_same(function(url), function(folder))
    request = load_tensors_metadata(folder)
    assert_same(load(request, url), load(load_tensors_metadata(folder), folder))


def test_the_metadata_of_a_loaded_url_is_read_on_demand(s3: Any, golden: Path) -> None:
    inner = TORCH_DIST + iteration_of(golden / TORCH_DIST)
    strategy = TorchDistLoadShardedStrategy()
    load(load_tensors_metadata(f"s3://runs/{inner}"), f"s3://runs/{inner}", strategy)
    assert strategy.cached_global_metadata is not None


def _load_share(rank: int, world: int, env: dict[str, str], path: str) -> dict[str, bytes]:
    os.environ.update(env)
    metadata = CkptStorageReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    mine = dict(sorted(tensors.items())[rank::world])
    dcp.load(mine, storage_reader=CkptStorageReader(path))
    return {key: bytes_of(tensor) for key, tensor in mine.items()}


def test_ranks_load_their_parts_from_a_url_with_torch(s3: Any, golden: Path) -> None:
    shares = run_ranks(2, _load_share, store_environment(), f"s3://runs/{FSDP}")
    assert all(shares)
    assert shares == run_ranks(2, _load_share, {}, str(golden / FSDP))


def test_a_bucket_that_does_not_exist_is_named(s3: Any) -> None:
    with pytest.raises(StorageError, match="no such bucket: nowhere"):
        load_common_state_dict("s3://nowhere/ckpt")
    with pytest.raises(UsageError, match="s3://runs/missing does not exist"):
        load_common_state_dict("s3://runs/missing")


def test_tensors_of_a_url_are_not_removed(s3: Any, golden: Path) -> None:
    with pytest.raises(UsageError, match="local path"):
        remove_sharded_tensors(f"s3://runs/{TORCH_DIST}", "decoder.")
