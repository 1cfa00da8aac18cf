"""The backend zarr: saved by ranks, read by the engine, zarr and TensorStore; its documented
helpers.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from numcodecs import Zlib

from core.dist_checkpointing import serialization
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.prepared_save import prepare_save
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from core.dist_checkpointing.strategies import zarr as strategy
from core.dist_checkpointing.strategies import zarr_types
from core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from core.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from core.dist_checkpointing.strategies.zarr_types import cast_array, numpy_of, tensor_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.dist_checkpointing.zarr_states import (
    SHAPES,
    bits,
    check_loaded,
    global_bits,
    save,
    save_columns,
    state,
)
from tests.support.zarr_files import files_of

LOADER = ZarrLoadShardedStrategy("zarr", 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state as four ranks save it; to be read only."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(4, save, str(root))
    return root


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One tensor ``w`` of shape (6, 8), in two chunks of columns."""
    save_columns(tmp_path)
    return tmp_path


def _load(rank: int, world: int, root: str) -> None:
    check_loaded(LOADER.load(state(rank, world, is_filled=False), root), rank, world)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("savers", "loaders"),
    [(1, 2), (4, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 4), (4, 4)])],
)
def test_what_ranks_save_other_ranks_load(tmp_path: Path, savers: int, loaders: int) -> None:
    run_ranks(savers, save, str(tmp_path))
    run_ranks(loaders, _load, str(tmp_path))


@pytest.mark.dist
def test_every_shard_is_a_chunk_of_plain_bytes_and_nothing_else_is_written(saved: Path) -> None:
    expected: dict[str, bytes] = {}
    for rank in range(4):
        for part in nested_values(state(rank, 4)):
            if not is_main_replica(part.replica_id) or not part.data.numel():
                continue
            name = ".".join(map(str, part.local_chunk_offset_in_global())) or "0"
            before = expected.get(f"{part.key}/{name}", b"")
            expected[f"{part.key}/{name}"] = before + bits(part.data)
    files = files_of(saved)
    metadata = {
        name: json.loads(files.pop(name)) for name in list(files) if name.endswith(".zarray")
    }
    assert files == expected
    assert set(metadata) == {f"{key}/.zarray" for key in SHAPES}
    assert metadata["layers.fc1/.zarray"] == {
        "chunks": [1, 4, 6],
        "compressor": None,
        "dtype": "bfloat16",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [4, 8, 6],
        "zarr_format": 2,
    }


@pytest.mark.dist
@pytest.mark.parametrize("key", SHAPES)
def test_zarr_and_tensorstore_open_what_ranks_saved(saved: Path, key: str) -> None:
    by_zarr = zarr.open_array(saved / key, mode="r")
    by_tensorstore = ts.open(
        {"driver": "zarr", "kvstore": f"file://{saved / key}/"}, open=True
    ).result()
    assert by_zarr.shape == tuple(by_tensorstore.shape) == SHAPES[key][0]
    assert bits(tensor_of(by_zarr[...], key=key)) == global_bits(key)
    assert bits(tensor_of(by_tensorstore.read().result(), key=key)) == global_bits(key)


def _save_torch_dist(rank: int, world: int, root: str) -> None:
    tensors = [
        part for part in nested_values(state(rank, world)) if is_main_replica(part.replica_id)
    ]
    work = prepare_save(tensors, (), root, format="torch_dist")
    comm.together(work.write)
    comm.together(lambda: work.finish() if rank == 0 else None)


def _complete(root: Path, backend: str) -> None:
    """What the common strategy and ``save`` write."""
    torch.save({"iteration": 3}, root / "common.pt")
    (root / "metadata.json").write_text(
        json.dumps({"sharded_backend": backend, "sharded_backend_version": 1})
    )


@pytest.mark.dist
def test_a_strategy_saves_what_ckpt_convert_makes_of_torch_dist(tmp_path: Path) -> None:
    direct, other, converted = (
        tmp_path / "direct",
        tmp_path / "torch_dist",
        tmp_path / "converted/iter_0000003",
    )
    direct.mkdir()
    other.mkdir()
    run_ranks(4, save, str(direct))
    run_ranks(4, _save_torch_dist, str(other))
    _complete(direct, "zarr")
    _complete(other, "torch_dist")
    run(Job(src=other, dst=converted.parent, to="zarr", fsync=False))
    with bridge.open_catalog(direct) as (ours, _), bridge.open_catalog(converted) as (theirs, _):
        assert ours.tensors == theirs.tensors
        for key in SHAPES:
            assert sorted(ours.fragments(key), key=str) == sorted(theirs.fragments(key), key=str)
    expected, files = files_of(converted), files_of(direct)
    del expected["common.pt"], files["common.pt"], expected["metadata.json"], files["metadata.json"]
    assert files == expected


@pytest.mark.parametrize("how", ["strategy", "helper"])
def test_a_missing_chunk_is_named_not_zeros(small: Path, how: str) -> None:
    (small / "w/0.1").unlink()
    part = part_of("w", (6, 8), is_filled=False)
    with pytest.raises(MissingShardError, match=r"w/0\.1"):
        LOADER.load({"w": part}, small) if how == "strategy" else strategy._load_from_array(
            part, small
        )


def test_a_helper_needs_only_the_chunks_of_its_region(small: Path) -> None:
    (small / "w/0.1").unlink()
    part = part_of("w", (6, 8), (1, 0, 2), is_filled=False)
    assert bits(strategy._load_from_array(part, small)) == bits(
        part_of("w", (6, 8), (1, 0, 2)).data
    )


@pytest.mark.parametrize("how", ["strategy", "helper"])
def test_a_chunk_cut_short_is_named(small: Path, how: str) -> None:
    (small / "w/0.0").write_bytes(bytes(7))
    part = part_of("w", (6, 8), is_filled=False)
    with pytest.raises(TruncatedError, match=r"w/0\.0"):
        LOADER.load({"w": part}, small) if how == "strategy" else strategy._load_from_array(
            part, small
        )


@pytest.mark.parametrize("how", ["strategy", "helper"])
def test_another_shape_is_an_error_unless_it_may_differ(small: Path, how: str) -> None:
    def load(part: ShardedTensor) -> torch.Tensor:
        part = part.without_data()
        return (
            LOADER.load({"w": part}, small)["w"]
            if how == "strategy"
            else strategy._load_from_array(part, small)
        )

    values = global_tensor("w", (6, 8))
    with pytest.raises(CheckpointingException, match=r"\(6, 8\).*\(4, 8\)|\(4, 8\).*\(6, 8\)"):
        load(part_of("w", (4, 8)))
    smaller = load(part_of("w", (4, 6), allow_shape_mismatch=True))
    assert torch.equal(smaller, values[:4, :6])
    padded = load(part_of("w", (8, 8), (0, 1, 2), allow_shape_mismatch=True))
    assert torch.equal(padded, torch.cat([values[4:], torch.zeros(2, 8)]))
    beyond = load(part_of("w", (12, 8), (0, 1, 2), allow_shape_mismatch=True))
    assert torch.equal(beyond, torch.zeros(6, 8))


@pytest.mark.parametrize("how", ["strategy", "helper"])
def test_a_tensor_arrives_in_the_type_that_is_asked_for(small: Path, how: str) -> None:
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 8, dtype=torch.bfloat16))
    tensor = (
        LOADER.load({"w": part}, small)["w"]
        if how == "strategy"
        else strategy._load_from_array(part, small)
    )
    assert bits(tensor) == bits(global_tensor("w", (6, 8)).bfloat16())


@pytest.mark.parametrize("how", ["strategy", "helper"])
def test_a_flattened_range_is_cut_last(small: Path, how: str) -> None:
    part = flat_part_of("w", (6, 8), 3, 11, offsets=((1, 1, 2),), is_filled=False)
    tensor = (
        LOADER.load({"w": part}, small)["w"]
        if how == "strategy"
        else strategy._load_from_array(part, small)
    )
    assert torch.equal(tensor, global_tensor("w", (6, 8))[:, 4:].flatten()[3:11])


def test_tensors_with_data_are_loaded_in_place(small: Path) -> None:
    part = part_of("w", (6, 8), is_filled=False)
    data = part.data
    assert LOADER.load({"w": part}, small)["w"] is data
    assert torch.equal(data, global_tensor("w", (6, 8)))


def test_arrays_are_not_written_over(small: Path) -> None:
    with pytest.raises(UsageError, match="the array already exists"):
        ZarrSaveShardedStrategy("zarr", 1).save({"w": part_of("w", (6, 8))}, small)
    with pytest.raises(UsageError, match="the array already exists"):
        strategy._create_zarr_array(part_of("w", (6, 8)), small)


def test_sharded_objects_are_refused(small: Path) -> None:
    tree = {"rng": ShardedObject("rng", [1], (1,), (0,))}
    assert not LOADER.can_handle_sharded_objects
    with pytest.raises(UsageError, match=r"ShardedObject.*rng"):
        LOADER.load(tree, small)
    with pytest.raises(UsageError, match=r"ShardedObject.*rng"):
        ZarrSaveShardedStrategy("zarr", 1).save(tree, small)


def _fails(rank: int, world: int, root: str) -> str:
    key = "w" if rank == 0 else "v"
    try:
        LOADER.load({"w": part_of(key, (6, 8), is_filled=False)}, root)
    except MissingShardError as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
def test_a_failed_load_is_raised_on_every_rank(small: Path) -> None:
    other, own = run_ranks(2, _fails, str(small))
    assert own.startswith("the checkpoint has no such tensor") and "tensor v" in own
    assert other.startswith("rank 1 failed") and "tensor v" in other


def _save_irregular(rank: int, world: int, root: str) -> str:
    shape, offset = ((2, 4), (0, 0)) if rank == 0 else ((3, 4), (3, 0))
    part = ShardedTensor("w", torch.zeros(shape), torch.float32, shape, (6, 4), offset, (2, 1))
    try:
        ZarrSaveShardedStrategy("zarr", 1).save({"w": part}, root)
    except CheckpointingException as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
def test_shards_that_are_no_grid_are_refused_on_every_rank_before_anything_is_written(
    tmp_path: Path,
) -> None:
    texts = run_ranks(2, _save_irregular, str(tmp_path))
    assert all("grid" in text for text in texts)
    assert not list(tmp_path.rglob("*"))


UNEVEN_ROWS = [[(0, 1), (1, 4)], [(4, 4), (4, 7)]]
"""The rows that each rank has: begin and end of every shard, one of them empty."""


def _save_uneven(rank: int, world: int, root: str) -> None:
    parts = [
        _rows_of(name, start, stop, column)
        for start, stop in UNEVEN_ROWS[rank]
        for name, columns in (("rows", [(0, 6)]), ("cells", [(0, 3), (3, 6)]))
        for column in columns
    ]
    ZarrSaveShardedStrategy("zarr", 1).save(dict(enumerate(parts)), root)


def _rows_of(name: str, start: int, stop: int, columns: tuple[int, int]) -> ShardedTensor:
    data = global_tensor(name, (7, 6))[start:stop, columns[0] : columns[1]].clone()
    offset = (start, columns[0])
    return ShardedTensor(name, data, data.dtype, tuple(data.shape), (7, 6), offset, None)


@pytest.mark.dist
def test_uneven_shards_of_several_ranks_are_parts_of_one_chunk(tmp_path: Path) -> None:
    run_ranks(2, _save_uneven, str(tmp_path))
    # Axes that the shards divide evenly are still divided.
    for name, chunk_shape in (("rows", (7, 6)), ("cells", (7, 3))):
        array = zarr.open_array(tmp_path / name, mode="r")
        assert array.chunks == chunk_shape
        assert bits(torch.from_numpy(array[...])) == bits(global_tensor(name, (7, 6)))
        asked = part_of(name, (7, 6), is_filled=False)
        loaded = ZarrLoadShardedStrategy("zarr", 1).load({"w": asked}, tmp_path)["w"]
        assert torch.equal(loaded, global_tensor(name, (7, 6)))


def _save_by_helpers(rank: int, world: int, root: str) -> None:
    parts = list(nested_values(state(rank, world)))
    arrays = strategy._create_or_open_zarr_arrays(parts, Path(root))
    assert [array is None for array in arrays] == [
        not is_main_replica(part.replica_id) for part in parts
    ]
    for part, array in zip(parts, arrays, strict=True):
        strategy._save_to_existing_array(part, array)


@pytest.mark.dist
def test_the_documented_helpers_write_the_same_files(tmp_path: Path, saved: Path) -> None:
    run_ranks(4, _save_by_helpers, str(tmp_path))
    assert files_of(tmp_path) == files_of(saved)


@pytest.mark.dist
def test_the_documented_helper_reads_the_same_tensors(saved: Path) -> None:
    for rank in range(4):
        tensors = [
            strategy._load_from_array(part, saved)
            for part in nested_values(state(rank, 4, is_filled=False))
        ]
        check_loaded(tensors, rank, 4)


def test_chunks_of_zeros_are_written(tmp_path: Path) -> None:
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
    strategy._save_to_existing_array(part, strategy._create_zarr_array(part, tmp_path))
    assert (tmp_path / "w/0").read_bytes() == bytes(16)


def test_the_first_shard_of_the_main_replica_creates_the_array() -> None:
    assert strategy._should_create_array(part_of("w", (6, 8), (1, 0, 2)))
    assert strategy._should_create_array(part_of("step", ()))
    assert strategy._should_create_array(flat_part_of("w", (6, 8), 0, 5))
    assert not strategy._should_create_array(flat_part_of("w", (6, 8), 5, 9))
    assert not strategy._should_create_array(flat_part_of("w", (6, 8), 0, 0)), (
        "another piece begins there, too"
    )
    assert not strategy._should_create_array(part_of("w", (6, 8), (1, 1, 2)))
    assert not strategy._should_create_array(part_of("w", (6, 8), (1, 0, 2), replica_id=(0, 1)))


def test_no_file_stays_open(small: Path) -> None:
    part = part_of("w", (6, 8), is_filled=False)
    loaders = [LOADER, TensorStoreLoadShardedStrategy()]

    def load_all() -> None:
        strategy._load_from_array(part, small)
        for loader in loaders:
            loader.load({"w": part}, small)
            loader.load_tensors_metadata(small)

    load_all()
    # Only the checkpoint's files count: a thread of another test may open one of its own meanwhile.
    assert [file for file in _open_files() if file.startswith(str(small))] == []


def _open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return paths


def _save_and_load_in_parallel(rank: int, world: int, root: str) -> None:
    saver = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy("zarr", 1))
    saver.save(state(rank, world), root)
    loader = FullyParallelLoadStrategyWrapper(LOADER)
    check_loaded(loader.load(state(rank, world, is_filled=False), root), rank, world)


@pytest.mark.dist
def test_saving_and_loading_can_be_shared_among_replicas(tmp_path: Path, saved: Path) -> None:
    run_ranks(4, _save_and_load_in_parallel, str(tmp_path))
    assert files_of(tmp_path) == files_of(saved)


def test_replicas_are_not_written_and_main_ones_need_an_array(tmp_path: Path) -> None:
    strategy._save_to_existing_array(part_of("w", (6, 8), replica_id=1), None)
    with pytest.raises(UsageError, match="the array of a main replica is missing"):
        strategy._save_to_existing_array(part_of("w", (6, 8)), None)


def test_a_flattened_shard_that_is_no_chunk_is_refused(small: Path) -> None:
    array = strategy._open_zarr_array_verbose(small / "w", "r+")
    with pytest.raises(UnsupportedError, match="the shard of a flattened tensor has shape"):
        strategy._save_to_existing_array(flat_part_of("w", (6, 8), 0, 5), array)
    in_memory = zarr.create_array({}, shape=(6, 8), chunks=(6, 8), dtype="f4", zarr_format=2)
    with pytest.raises(UnsupportedError, match="to a local directory"):
        strategy._save_to_existing_array(flat_part_of("w", (6, 8), 0, 5), in_memory)
    options = {"shape": (6, 8), "chunks": (6, 8), "dtype": "f4", "zarr_format": 2}
    compressed = zarr.create_array(small / "z", **options, compressors=Zlib())
    with pytest.raises(UnsupportedError, match="encoded chunk"):
        strategy._save_to_existing_array(flat_part_of("w", (6, 8), 0, 5), compressed)


def test_an_array_that_is_not_there_or_broken_is_named(small: Path) -> None:
    with pytest.raises(MissingShardError, match="there is no Zarr array at .*v"):
        strategy._open_zarr_array_verbose(small / "v", "r")
    with pytest.raises(MissingShardError, match="does not exist"):
        strategy._open_zarr_array_verbose(small / "no" / "v", "r")
    (small / "w/.zarray").write_text('{"zarr_format": 2}')
    with pytest.raises(CorruptError, match="cannot open"):
        strategy._open_zarr_array_verbose(small / "w", "r")


def test_postprocessing_pads_and_cuts_only_where_that_is_allowed() -> None:
    part = part_of("w", (6, 8))
    array = global_tensor("w", (6, 8)).numpy()
    assert torch.equal(strategy.postprocess_numpy_array(array, part), part.data)
    with pytest.raises(CheckpointingException, match=r"\(5, 8\).*\(6, 8\)"):
        strategy.postprocess_numpy_array(array[:5], part)
    flexible = part_of("w", (6, 8), allow_shape_mismatch=True)
    padded = strategy.postprocess_numpy_array(array[:5, :7], flexible)
    assert (
        torch.equal(padded[:5, :7], part.data[:5, :7])
        and not padded[5].any()
        and not padded[:, 7].any()
    )
    with pytest.raises(CheckpointingException, match=r"\(6, 8\).*\(5, 8\)"):
        strategy.pad_to_expected_shape(part.data, part_of("w", (5, 8), allow_shape_mismatch=True))
    with pytest.raises(CheckpointingException, match=r"\(6,\)"):
        strategy.pad_to_expected_shape(torch.zeros(6), flexible)


def test_postprocessing_can_leave_the_flattened_range_for_later() -> None:
    part = flat_part_of("w", (6, 8), 3, 11)
    array = global_tensor("w", (6, 8)).numpy()
    assert torch.equal(strategy.postprocess_numpy_array(array, part), part.data)
    full = strategy.postprocess_numpy_array(array, part, apply_flattened_range=False)
    assert torch.equal(full, torch.from_numpy(array))
    assert torch.equal(strategy.flatten_range(part, full), part.data)


@pytest.mark.dist
def test_metadata_lists_all_arrays_and_passes_over_locks(saved: Path) -> None:
    lock = saved / "step.sync"
    lock.mkdir()
    (lock / ".zarray").touch()
    try:
        metadata = LOADER.load_tensors_metadata(saved)
    finally:
        (lock / ".zarray").unlink()
        lock.rmdir()
    assert {key: (part.global_shape, part.dtype) for key, part in metadata.items()} == SHAPES
    assert all(
        part.data is None and part.local_shape == part.global_shape for part in metadata.values()
    )
    assert LOADER.load_sharded_metadata(saved) == LOADER.load_tensors_metadata(saved)


def test_tensors_and_objects_are_removed_by_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {
        "w": part_of("w", (2,)),
        "x": part_of("x.a", (2,)),
        "y": part_of("x.b/c", (2,)),
        "rng": ShardedObject("x.rng", [1], (1,), (0,)),
        "kept": ShardedObject("rng", [2], (1,), (0,)),
    }
    serialization.save(tree, tmp_path, ("zarr", 1))
    serialization.remove_sharded_tensors(tmp_path, "x.")
    assert set(serialization.load_sharded_metadata(tmp_path)) == {"w", "rng/shard_0_1"}
    assert not list(tmp_path.glob("x.*"))
    wanted = {
        "w": part_of("w", (2,), is_filled=False),
        "kept": ShardedObject("rng", None, (1,), (0,)),
    }
    assert serialization.load(wanted, tmp_path)["kept"] == [2]
    LOADER.remove_sharded_tensors(tmp_path, "x.")
    assert "no key in" in caplog.text
    with pytest.raises(UsageError, match="empty prefix"):
        LOADER.remove_sharded_tensors(tmp_path, "")


def test_a_whole_state_is_saved_and_loaded_by_the_documented_functions(tmp_path: Path) -> None:
    objects = {"rng": ShardedObject("rng", {"seed": [1, 2]}, (1,), (0,)), "iteration": 7}
    serialization.save({**state(0, 1), **objects}, tmp_path, ("zarr", 1))
    wanted = {**state(0, 1, is_filled=False), "rng": ShardedObject("rng", None, (1,), (0,))}
    loaded = serialization.load(wanted, tmp_path)
    assert (loaded.pop("rng"), loaded.pop("iteration")) == ({"seed": [1, 2]}, 7)
    check_loaded(loaded, 0, 1)
    assert {
        key: bits(tensor) for key, tensor in serialization.load_plain_tensors(tmp_path).items()
    } == {key: global_bits(key) for key in SHAPES}


def test_only_backend_zarr_of_version_1_is_loaded() -> None:
    LOADER.check_backend_compatibility("zarr")
    LOADER.check_version_compatibility(1)
    with pytest.raises(UnsupportedError, match="torch_dist"):
        LOADER.check_backend_compatibility("torch_dist")
    with pytest.raises(UnsupportedError, match="2"):
        LOADER.check_version_compatibility(2)


def test_the_zarr_strategies_are_the_default_ones() -> None:
    assert (
        type(get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1))
        is ZarrSaveShardedStrategy
    )
    assert (
        type(get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1))
        is ZarrLoadShardedStrategy
    )


@pytest.mark.parametrize("dtype", strategy.torch_to_numpy_dtype_dict, ids=str)
def test_every_type_goes_through_zarr_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = np.random.default_rng(7).integers(
        0, 2 if dtype == torch.bool else 256, 24 * dtype.itemsize, np.uint8
    )
    values = torch.from_numpy(raw).view(dtype).reshape(4, 6)
    part = ShardedTensor.from_rank_offsets("w", values)
    strategy._save_to_existing_array(part, strategy._create_zarr_array(part, tmp_path))
    array = zarr.open_array(tmp_path / "w", mode="r")
    assert array.dtype == strategy.torch_to_numpy_dtype_dict[dtype]
    assert (
        bits(strategy._load_from_array(part.without_data(), tmp_path))
        == bits(values)
        == raw.tobytes()
    )
    assert bits(tensor_of(array[1:3, 2:], key="w")) == bits(values[1:3, 2:])


def test_registered_types_have_fill_values_and_can_be_made_by_zarr(tmp_path: Path) -> None:
    dtype = zarr_types.torch_to_numpy_dtype_dict[torch.bfloat16]
    for number, fill in enumerate([0, 1.5, float("inf"), float("-inf"), float("nan")]):
        array = zarr.create_array(
            tmp_path / str(number),
            shape=(2,),
            chunks=(2,),
            dtype=dtype,
            zarr_format=2,
            fill_value=fill,
        )
        reopened = zarr.open_array(tmp_path / str(number), mode="r")
        assert reopened.metadata == array.metadata or fill != fill
        assert bits(tensor_of(reopened[:], key="w")) == bits(
            torch.full((2,), fill, dtype=torch.bfloat16)
        )
    with pytest.raises(TypeError, match="bfloat16"):
        reopened.metadata.dtype.cast_scalar("abc")


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_other_byte_orders_and_layouts_become_tensors(order: Any) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4).astype(">i4"), order=order)
    array.setflags(write=False)
    assert torch.equal(tensor_of(array, key="w"), torch.arange(12, dtype=torch.int32).reshape(3, 4))
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert numpy_of(strided, key="w").tolist() == strided.tolist()
    assert cast_array(array, torch.int64, key="w").dtype == np.int64


def test_types_that_zarr_or_torch_lack_and_casts_that_lose_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bits8"):
        numpy_of(torch.empty(2, dtype=torch.bits8), key="w")
    with pytest.raises(UnsupportedError, match="bits8"):
        cast_array(np.zeros(2), torch.bits8, key="w")
    with pytest.raises(UnsupportedError, match="U3"):
        tensor_of(np.array(["abc"]), key="w")
    with pytest.raises(UnsupportedError, match="casting float64 to int64 is not supported"):
        cast_array(np.zeros(2), torch.int64, key="w")


@pytest.mark.parametrize("case", ["dense_gqa/tp2_pp2", "moe_seq"])
def test_checkpoints_of_old_megatron_are_read_alike_by_engine_and_helpers(
    golden: Path, case: str
) -> None:
    roots = sorted(
        path.parent
        for path in (golden / "mcore0121_zarr").rglob("metadata.json")
        if case in str(path)
    )
    assert roots
    metadata = LOADER.load_tensors_metadata(roots[0])
    loaded = LOADER.load({key: part.without_data() for key, part in metadata.items()}, roots[0])
    for key, part in metadata.items():
        assert bits(loaded[key]) == bits(strategy._load_from_array(part, roots[0])), key
