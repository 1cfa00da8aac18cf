"""common.pt and the files of ShardedObjects: what Megatron's own strategy writes and reads, and
failures.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.dist_checkpointing._values import objects
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.serialization import save
from core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from core.dist_checkpointing.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from core.errors import (
    CapacityError,
    CheckpointingException,
    CorruptError,
    MissingShardError,
    StorageError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from core.verbs.convert import run as convert
from core.verbs.convert.job import Job
from tests.dist_checkpointing.live_values import assert_alike
from tests.dist_checkpointing.ranks import run_ranks

SAVE = TorchCommonSaveStrategy("torch", 1)
LOAD = TorchCommonLoadStrategy()
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space/iter_0000010"


def common_state() -> dict[str, object]:
    return {
        "iteration": 10,
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, paths=[Path("/data")]),
        "optimizer": {"param_groups": [{"betas": (0.9, 0.95), "step": torch.tensor(3)}]},
        "rng": [np.random.RandomState(3).get_state(), torch.Generator().manual_seed(4).get_state()],
    }


def shard(index: int, n: int, data: object = None, **options: object) -> ShardedObject:
    return ShardedObject("rng_state", data, (1, n), (0, index), **options)


def test_the_common_state_comes_back(tmp_path: Path):
    SAVE.save_common(common_state(), tmp_path)
    assert os.listdir(tmp_path) == ["common.pt"]
    assert_alike(LOAD.load_common(str(tmp_path)), common_state())
    assert_alike(torch.load(tmp_path / "common.pt", weights_only=False), common_state())


def test_sharded_objects_come_back_in_their_places(tmp_path: Path):
    state = {
        "a": [shard(0, 2, {"x": torch.arange(3)})],
        "b": {"c": shard(1, 2, (1, 2))},
        "d": shard(0, 2, 5, replica_id=1),
    }
    SAVE.save_sharded_objects(state, tmp_path)
    assert sorted(os.listdir(tmp_path / "rng_state")) == ["shard_0.0_1.2.pt", "shard_0.1_1.2.pt"]
    wanted = {"a": [shard(0, 2)], "b": {"c": shard(1, 2)}}
    loaded = LOAD.load_sharded_objects(wanted, tmp_path)
    assert loaded is wanted
    assert_alike(loaded, {"a": [{"x": torch.arange(3)}], "b": {"c": (1, 2)}})


def test_metadata_are_read_from_names_alone(tmp_path: Path):
    SAVE.save_sharded_objects(
        [shard(0, 2, 1), shard(1, 2, 2), ShardedObject("in/a/folder", 3, (4,), (3,))], tmp_path
    )
    for path in tmp_path.rglob("*.pt"):
        path.write_bytes(b"")
    metadata = LOAD.load_sharded_metadata(tmp_path)
    expected = [shard(0, 2), shard(1, 2), ShardedObject("in/a/folder", None, (4,), (3,))]
    assert metadata == {item.unique_key: item for item in expected}


def test_shards_named_by_the_first_checkpoints_are_read(tmp_path: Path):
    SAVE.save_sharded_objects([shard(0, 2, "first"), shard(1, 2, "second")], tmp_path)
    folder = tmp_path / "rng_state"
    for index in range(2):
        (folder / f"shard_0.{index}_1.2.pt").rename(folder / f"shard_0.{index}_1.pt")
    assert LOAD.load_sharded_metadata(tmp_path) == {
        shard(i, 2).unique_key: shard(i, 2) for i in range(2)
    }
    assert LOAD.load_sharded_objects([shard(1, 2)], tmp_path) == ["second"]


def test_the_default_strategies_are_these():
    load = get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    save = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
    assert isinstance(load, TorchCommonLoadStrategy) and load.can_handle_sharded_objects
    assert isinstance(save, TorchCommonSaveStrategy) and save.can_handle_sharded_objects()


def test_other_backends_and_versions_are_refused():
    LOAD.check_backend_compatibility("torch")
    LOAD.check_version_compatibility(1)
    with pytest.raises(UnsupportedError, match="'pickle'"):
        LOAD.check_backend_compatibility("pickle")
    with pytest.raises(UnsupportedError, match="version 2"):
        LOAD.check_version_compatibility(2)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(MissingShardError, match="common.pt"):
        LOAD.load_common(tmp_path)
    SAVE.save_sharded_objects([shard(0, 2, 1)], tmp_path)
    with pytest.raises(
        MissingShardError,
        match=r"rng_state/shard_0\.1_1\.2.*contains these shards of rng_state: shard_0\.0_1\.2\.pt",
    ):
        LOAD.load_sharded_objects([shard(1, 2)], tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_damaged_file_is_named(tmp_path: Path, keep: int):
    SAVE.save_common(common_state(), tmp_path)
    path = tmp_path / "common.pt"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((CorruptError, UnsupportedError), match="common.pt"):
        LOAD.load_common(tmp_path)


def test_a_common_state_that_is_no_dict_is_refused(tmp_path: Path):
    torch.save([1], tmp_path / "common.pt")
    with pytest.raises(CorruptError, match=r"a list, not a dict \(file common.pt"):
        LOAD.load_common(tmp_path)


def test_keys_cannot_lead_out_of_the_directory(tmp_path: Path):
    (tmp_path / "in").mkdir()
    with pytest.raises(UnsafeError):
        SAVE.save_sharded_objects([ShardedObject("../out", 1, (1,), (0,))], tmp_path / "in")
    with pytest.raises(UnsafeError):
        LOAD.load_sharded_objects([ShardedObject("../out", None, (1,), (0,))], tmp_path / "in")
    assert os.listdir(tmp_path) == ["in"]


def test_what_is_no_sharded_object_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="expected a ShardedObject, found a int"):
        SAVE.save_sharded_objects({"a": 3}, tmp_path)


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path):
    SAVE.save_common({"iteration": 1}, tmp_path)
    with pytest.raises(UnsupportedError, match="sparse"):
        SAVE.save_common({"iteration": 2, "bad": torch.eye(2).to_sparse()}, tmp_path)
    assert LOAD.load_common(tmp_path) == {"iteration": 1}
    assert os.listdir(tmp_path) == ["common.pt"]
    with pytest.raises(StorageError, match="does not exist"):
        SAVE.save_common({}, tmp_path / "absent")


def test_files_are_replaced_at_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    SAVE.save_common({"iteration": 1}, tmp_path)

    def stopped(fd: int) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(CapacityError, match="no space"):
        SAVE.save_common({"iteration": 2}, tmp_path)
    monkeypatch.undo()
    assert LOAD.load_common(tmp_path) == {"iteration": 1}
    assert os.listdir(tmp_path) == ["common.pt"]


@pytest.mark.parametrize("source", ["mcore0161_torch_dist/dense_gqa/tp2_pp2/iter_0000010", ZARR])
def test_converting_a_saved_checkpoint_gives_the_same_files(
    golden: Path, tmp_path: Path, source: str
):
    saved = tmp_path / "saved"
    shutil.copytree(golden / source, saved)
    stored = LOAD.load_sharded_metadata(saved)
    for item in stored.values():
        [item.data] = LOAD.load_sharded_objects(
            [ShardedObject.empty_from_unique_key(item.unique_key)], saved
        )
    SAVE.save_common(LOAD.load_common(saved), saved)
    SAVE.save_sharded_objects(stored, saved)
    convert.run(Job(src=saved, dst=tmp_path / "converted"))
    [converted] = (tmp_path / "converted").glob("iter_*")
    for name in ("common.pt", *(f"{key}.pt" for key in stored)):
        assert (saved / name).read_bytes() == (converted / name).read_bytes(), name


def test_megatrons_strategy_reads_what_is_written(tmp_path: Path):
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.strategies.common")
    from megatron.core.dist_checkpointing.mapping import ShardedObject as TheirObject

    state = common_state() | {"simple": SimpleNamespace(a=1), "extra": [io.BytesIO(b"scales")]}
    SAVE.save_common(state, tmp_path)
    SAVE.save_sharded_objects([shard(0, 1, {"a": torch.arange(4)})], tmp_path)
    loader = theirs.TorchCommonLoadStrategy()
    assert_alike(loader.load_common(tmp_path), state)
    loaded = loader.load_sharded_objects([TheirObject("rng_state", None, (1, 1), (0, 0))], tmp_path)
    assert_alike(loaded, [{"a": torch.arange(4)}])
    assert list(loader.load_sharded_metadata(tmp_path)) == [shard(0, 1).unique_key]


def _save_with_megatron(rank: int, world: int, folder: str) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject as TheirObject
    from megatron.core.dist_checkpointing.strategies.common import (
        TorchCommonSaveStrategy as TheirStrategy,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    strategy = TheirStrategy("torch", 1)
    strategy.save_common(
        common_state() | {"kind": ModelType.encoder_or_decoder, "config": OptimizerConfig()}, folder
    )
    strategy.save_sharded_objects(
        [TheirObject("rng_state", common_state(), (1, 1), (0, 0))], folder
    )


@pytest.mark.dist
def test_what_megatrons_strategy_writes_is_read(tmp_path: Path):
    pytest.importorskip("megatron.core")
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    run_ranks(1, _save_with_megatron, str(tmp_path))
    common = LOAD.load_common(tmp_path)
    assert common.pop("kind") is ModelType.encoder_or_decoder
    assert common.pop("config") == OptimizerConfig()
    assert_alike(common, common_state())
    assert_alike(LOAD.load_sharded_objects([shard(0, 1)], tmp_path), [common_state()])


def test_the_newest_dialect_has_its_common_state_in_an_item(golden: Path):
    folder = next(
        path.parent for path in sorted((golden / "mcore_torch_dist").rglob("metadata.json"))
    )
    assert not (folder / "common.pt").exists()
    common = LOAD.load_common(folder)
    assert common["iteration"] == 10 and common["args"].num_layers == 4


def _save(rank: int, world: int, folder: str) -> object:
    SAVE.save_common({"rank": rank}, folder)
    SAVE.save_sharded_objects(
        [shard(rank, world, f"of {rank}"), ShardedObject("one", rank, (1,), (0,), rank)], folder
    )
    return LOAD.load_common(folder), LOAD.load_sharded_objects(
        [shard(i, world) for i in range(world)], folder
    )


@pytest.mark.dist
def test_every_rank_writes_its_objects_and_rank_0_the_common_state(tmp_path: Path):
    assert run_ranks(3, _save, str(tmp_path)) == [({"rank": 0}, ["of 0", "of 1", "of 2"])] * 3
    assert LOAD.load_sharded_objects([ShardedObject("one", None, (1,), (0,))], tmp_path) == [0]


def _fail(rank: int, world: int, folder: str) -> str:
    bad = torch.eye(2).to_sparse() if rank == 0 else 1
    try:
        SAVE.save_common({"bad": bad}, folder)
    except UnsupportedError as err:
        return f"{type(err).__name__}: {err}"
    return "saved"


@pytest.mark.dist
def test_a_failure_to_write_is_raised_on_every_rank(tmp_path: Path):
    own, *rest = run_ranks(2, _fail, str(tmp_path))
    assert own.startswith("UnsupportedError: a sparse")
    assert all(text.startswith("UnsupportedError: rank 0 failed: a sparse") for text in rest)
    assert os.listdir(tmp_path) == []


def _save_bad_object(rank: int, world: int, folder: str, backend: str) -> str:
    data = torch.eye(2).to_sparse() if rank == 1 else 1
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world)),
        "o": shard(rank, world, data),
    }
    try:
        save(state, folder, (backend, 1))
    except CheckpointingException as err:
        return f"{type(err).__name__}: {err}"
    return "saved"


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_an_object_that_cannot_be_saved_fails_the_save_on_every_rank(tmp_path: Path, backend: str):
    other, own = run_ranks(2, _save_bad_object, str(tmp_path), backend)
    assert own.startswith("UnsupportedError: a sparse")
    assert "rank 1 failed: a sparse" in other
    assert os.listdir(tmp_path) == []


def test_large_tensors_are_written_in_pieces(tmp_path: Path):
    tensor = torch.arange(1 << 20)
    pieces = list(objects.stream({"a": tensor, "view": tensor[5:]}).pieces())
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert sum(map(len, views)) == tensor.nbytes + tensor[5:].nbytes
    tensor[0] = 7
    assert bytes(views[0][:8]) == (7).to_bytes(8, "little")
