"""Checkpoints of backend zarr, loaded by TensorStore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.strategies import base, tensorstore
from core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from core.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    merge_global_slice_with_shape,
    open_ts_array,
    register_default_tensorstore_strategies,
)
from core.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.dist_checkpointing.zarr_states import SHAPES, bits, check_loaded, save, state

LOADER = TensorStoreLoadShardedStrategy()
IN_PLACE = TensorStoreLoadShardedStrategy(load_directly_on_device=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One tensor ``w`` of shape (6, 8) in one chunk."""
    ZarrSaveShardedStrategy("zarr", 1).save({"w": part_of("w", (6, 8))}, tmp_path)
    return tmp_path


def _load(rank: int, world: int, root: str, is_in_place: bool) -> None:
    wanted = state(rank, world, is_filled=False)
    loader = TensorStoreLoadShardedStrategy(load_directly_on_device=is_in_place)
    check_loaded(loader.load(wanted, root), rank, world)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("savers", "loaders", "is_in_place"), [(2, 1, False), (1, 2, True), (2, 4, False)]
)
def test_what_ranks_save_other_ranks_load(
    tmp_path: Path, savers: int, loaders: int, is_in_place: bool
) -> None:
    run_ranks(savers, save, str(tmp_path))
    run_ranks(loaders, _load, str(tmp_path), is_in_place)


@pytest.mark.dist
def test_metadata_is_that_of_the_other_strategy(tmp_path: Path) -> None:
    run_ranks(1, save, str(tmp_path))
    metadata = LOADER.load_tensors_metadata(tmp_path)
    assert metadata == ZarrLoadShardedStrategy("zarr", 1).load_tensors_metadata(tmp_path)
    assert {key: (part.global_shape, part.dtype) for key, part in metadata.items()} == SHAPES


def test_new_tensors_are_made_unless_data_is_to_be_loaded_into(small: Path) -> None:
    part = part_of("w", (6, 8), is_filled=False)
    data = part.data
    assert torch.equal(LOADER.load({"w": part}, small)["w"], global_tensor("w", (6, 8)))
    assert not torch.equal(data, global_tensor("w", (6, 8)))
    assert IN_PLACE.load({"w": part}, small)["w"] is data
    assert torch.equal(data, global_tensor("w", (6, 8)))
    with pytest.raises(UsageError, match="no data to load into"):
        IN_PLACE.load({"w": part_of("w", (6, 8)).without_data()}, small)


def test_parameters_that_need_gradients_are_loaded_in_place(small: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 8))
    tensor = IN_PLACE.load({"w": ShardedTensor.from_rank_offsets("w", parameter)}, small)["w"]
    assert tensor is parameter and torch.equal(parameter.detach(), global_tensor("w", (6, 8)))


def test_a_missing_chunk_is_named_not_zeros(small: Path) -> None:
    (small / "w/0.0").unlink()
    with pytest.raises(MissingShardError, match=r"w/0\.0"):
        LOADER.load({"w": part_of("w", (6, 8))}, small)


def test_a_damaged_chunk_is_named(small: Path) -> None:
    (small / "w/0.0").write_bytes(bytes(8))
    with pytest.raises(TruncatedError, match=r"w/0\.0"):
        LOADER.load({"w": part_of("w", (6, 8))}, small)


def test_a_compressed_chunk_that_cannot_be_decoded_is_an_error_of_the_project(
    tmp_path: Path,
) -> None:
    import zarr
    from numcodecs import Zlib

    array = zarr.create_array(
        tmp_path / "w", shape=(6, 8), chunks=(6, 8), dtype="f4", zarr_format=2, compressors=Zlib()
    )
    array[...] = global_tensor("w", (6, 8)).numpy()
    assert torch.equal(
        LOADER.load({"w": part_of("w", (6, 8))}, tmp_path)["w"], global_tensor("w", (6, 8))
    )
    (tmp_path / "w/0.0").write_bytes(b"no zlib data")
    with pytest.raises(CorruptError, match=r"TensorStore cannot read.*w"):
        LOADER.load({"w": part_of("w", (6, 8))}, tmp_path)


def test_another_shape_is_an_error_unless_it_may_differ(small: Path) -> None:
    def load(part: ShardedTensor) -> torch.Tensor:
        return LOADER.load({"w": part.without_data()}, small)["w"]

    values = global_tensor("w", (6, 8))
    with pytest.raises(CheckpointingException, match=r"\(6, 8\).*\(4, 8\)"):
        load(part_of("w", (4, 8)))
    assert torch.equal(load(part_of("w", (4, 6), allow_shape_mismatch=True)), values[:4, :6])
    padded = load(part_of("w", (8, 8), (0, 1, 2), allow_shape_mismatch=True))
    assert torch.equal(padded, torch.cat([values[4:], torch.zeros(2, 8)]))
    assert torch.equal(
        load(part_of("w", (12, 8), (0, 1, 2), allow_shape_mismatch=True)), torch.zeros(6, 8)
    )


def test_a_flattened_range_is_cut_last_and_casts_are_the_engines(small: Path) -> None:
    flat = flat_part_of("w", (6, 8), 3, 11, offsets=((1, 1, 2),), is_filled=False)
    assert torch.equal(
        LOADER.load({"w": flat}, small)["w"], global_tensor("w", (6, 8))[:, 4:].flatten()[3:11]
    )
    cast = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 8, dtype=torch.bfloat16))
    assert bits(LOADER.load({"w": cast}, small)["w"]) == bits(global_tensor("w", (6, 8)).bfloat16())


def test_a_slice_is_merged_with_the_stored_shape() -> None:
    region = (2, slice(0, 4), slice(4, 8))
    assert merge_global_slice_with_shape(region, (4, 4, 8), "w") == region
    assert merge_global_slice_with_shape(region, (4, 3, 6), "w") == (2, slice(0, 3), slice(4, 6))
    assert merge_global_slice_with_shape(region, (4, 3, 2), "w") == (2, slice(0, 3), slice(2, 2))
    with pytest.raises(CheckpointingException, match=r"index 2.*\(2, 3, 2\).*w"):
        merge_global_slice_with_shape(region, (2, 3, 2), "w")
    with pytest.raises(CheckpointingException, match="different numbers of axes: 2 and 3"):
        merge_global_slice_with_shape(region, (4, 4), "w")


def test_an_array_that_is_not_there_or_broken_is_named(small: Path) -> None:
    assert tuple(open_ts_array(small / "w").shape) == (6, 8)
    with pytest.raises(MissingShardError, match="there is no Zarr array at .*v"):
        open_ts_array(small / "v")
    (small / "w/.zarray").write_text("{}")
    with pytest.raises(CorruptError, match="TensorStore cannot open .*w"):
        open_ts_array(small / "w")


def _fails(rank: int, world: int, root: str) -> str:
    try:
        LOADER.load({"w": part_of("w" if rank == 0 else "v", (6, 8), is_filled=False)}, root)
    except MissingShardError as err:
        return type(err).__name__
    return "nothing"


@pytest.mark.dist
def test_a_failed_load_is_raised_on_every_rank(small: Path) -> None:
    assert run_ranks(2, _fails, str(small)) == ["MissingShardError"] * 2


def test_sharded_objects_and_other_backends_are_refused(small: Path) -> None:
    with pytest.raises(UsageError, match=r"ShardedObject.*rng"):
        LOADER.load({"rng": ShardedObject("rng", [1], (1,), (0,))}, small)
    LOADER.check_backend_compatibility("zarr")
    LOADER.check_version_compatibility(1)
    with pytest.raises(UnsupportedError, match="torch_dist"):
        LOADER.check_backend_compatibility("torch_dist")
    with pytest.raises(UnsupportedError, match="2"):
        LOADER.check_version_compatibility(2)


def test_the_strategy_becomes_the_default_when_it_is_registered() -> None:
    before = get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1)
    try:
        register_default_tensorstore_strategies()
        assert (
            type(get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1))
            is TensorStoreLoadShardedStrategy
        )
    finally:
        base.register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, before)


def test_a_shard_can_be_loaded_before_its_range_is_cut(small: Path) -> None:
    flat = flat_part_of("w", (6, 8), 3, 11)
    full = tensorstore._load_from_array(flat, small, apply_flattened_range=False)
    assert torch.equal(full, global_tensor("w", (6, 8)))
