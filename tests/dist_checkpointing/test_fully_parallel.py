"""Ranks that hold the same shards share the work on them, whatever the strategy, and end up with
all of it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from core.dist_checkpointing import mapping, serialization
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from core.dist_checkpointing.strategies.async_utils import AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    distribute_main_replicas_with_precomputed_distribution,
)
from core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from core.errors import (
    CheckpointingException,
    MissingShardError,
    StorageError,
    UnsupportedError,
    UsageError,
    WorkerError,
)
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import part_of

ALGORITHMS = ["broadcast", "gather_rounds", "gather_object"]


class PieceSave(SaveShardedStrategy):
    """Writes each main replica to a file of its own, whose name says which rank did."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__("pieces", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        for leaf in nested_values(sharded_state_dict):
            if is_main_replica(leaf.replica_id):
                torch.save(leaf.data, Path(checkpoint_dir, f"{file_of(leaf)}@{comm.rank()}"))


class AsyncPieceSave(AsyncSaveShardedStrategy):
    """The same, in the background."""

    def __init__(self) -> None:
        super().__init__("pieces", 1)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        return AsyncRequest(PieceSave().save, (sharded_state_dict, checkpoint_dir), [])


class PieceLoad(LoadShardedStrategy):
    """Reads those files, and remembers which."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        self.read: list[str] = []
        self.cached_global_metadata = "metadata"

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        return dict_list_map_outplace(
            lambda leaf: self._value(leaf, Path(checkpoint_dir)), sharded_state_dict
        )

    def _value(self, leaf: Any, checkpoint_dir: Path) -> Any:
        pieces = list(checkpoint_dir.glob(f"{file_of(leaf)}@*"))
        if len(pieces) != 1:
            raise StorageError(f"{len(pieces)} files", file=file_of(leaf))
        self.read.append(leaf.key)
        value = torch.load(pieces[0])
        if isinstance(leaf, ShardedObject):
            return value
        if leaf.data is None:
            leaf.init_data("cpu")
        leaf.data.copy_(value)
        return leaf.data

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        return {"metadata": checkpoint_dir}

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        self.read.append(f"removed {key_prefix}")

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        return {"sharded": checkpoint_dir}

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        if loaded_backend != "pieces":
            raise UnsupportedError("not pieces")

    def check_version_compatibility(self, loaded_version: Any) -> None:
        if loaded_version != 1:
            raise UnsupportedError("not version 1")


def file_of(leaf: Any) -> str:
    return f"{leaf.key}~{'.'.join(map(str, leaf.global_offset))}"


def state(
    rank: int, world: int, *, tp: int = 1, data: bool = True, n_tensors: int = 12
) -> dict[str, Any]:
    """Tensors cut over ``tp`` and replicated over the rest, nested in lists, beside objects; all
    elements differ.
    """
    tp_rank, dp_rank = rank % tp, rank // tp
    tensors = []
    for index in range(n_tensors):
        n = 8 * (index + 1)
        part = torch.arange(n, dtype=torch.float64) + 1e6 * index + 1e3 * tp_rank
        tensor = ShardedTensor.from_rank_offsets(
            f"w{index}", part, (0, tp_rank, tp), replica_id=(0, dp_rank)
        )
        tensor.data = part if data else None
        tensors.append(tensor)
    objects = [
        ShardedObject(
            f"o{index}",
            {"index": index, "tp": tp_rank} if data else None,
            (tp,),
            (tp_rank,),
            dp_rank,
        )
        for index in range(3)
    ]
    return {
        "mixed": [*tensors[:2], objects[0], {"deep": [objects[1], tensors[2:]]}],
        "last": objects[2],
    }


def expected(rank: int, world: int, **options: Any) -> Any:
    return dict_list_map_outplace(lambda leaf: leaf.data, state(rank, world, **options))


def equal(first: Any, other: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(equal(first[key], other[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(other) and all(map(equal, first, other))
    return torch.equal(first, other) if isinstance(first, torch.Tensor) else first == other


def group_of(rank: int, world: int, tp: int) -> Any:
    """The data-parallel group: the ranks with the same part of each tensor."""
    if tp == 1:
        return None
    groups = [dist.new_group(list(range(tp_rank, world, tp))) for tp_rank in range(tp)]
    return groups[rank % tp]


def test_in_one_process_the_wrapped_strategy_does_everything(tmp_path):
    state_dict = state(0, 1)
    save = FullyParallelSaveStrategyWrapper(PieceSave(), do_cache_distribution=True)
    save.save(state_dict, tmp_path)
    assert len(list(tmp_path.iterdir())) == 15
    base = PieceLoad()
    load = FullyParallelLoadStrategyWrapper(base)
    assert equal(load.load(state(0, 1, data=False), tmp_path), expected(0, 1))
    assert len(base.read) == 15 and load.apply_loading_parallelization(state_dict) is None


def test_the_wrappers_answer_for_what_they_wrap():
    base = PieceLoad()
    load = FullyParallelLoadStrategyWrapper(base)
    assert (
        load.can_handle_sharded_objects
        and FullyParallelSaveStrategyWrapper(PieceSave()).can_handle_sharded_objects
    )
    assert not FullyParallelSaveStrategyWrapper(AsyncPieceSave()).can_handle_sharded_objects
    assert (load.load_tensors_metadata("d"), load.load_sharded_metadata("d")) == (
        {"metadata": "d"},
        {"sharded": "d"},
    )
    load.remove_sharded_tensors("d", "w")
    assert base.read == ["removed w"]
    load.check_backend_compatibility("pieces")
    load.check_version_compatibility(1)
    with pytest.raises(UnsupportedError, match="not pieces"):
        load.check_backend_compatibility("zarr")
    with pytest.raises(UnsupportedError, match="not version 1"):
        load.check_version_compatibility(2)
    save = FullyParallelSaveStrategyWrapper(PieceSave())
    assert (save.backend, save.version) == ("pieces", 1)


def test_asynchronous_saving_needs_a_strategy_that_can(tmp_path):
    with pytest.raises(UsageError, match="cannot save asynchronously"):
        FullyParallelSaveStrategyWrapper(PieceSave()).async_save(state(0, 1), tmp_path)
    FullyParallelSaveStrategyWrapper(AsyncPieceSave()).async_save(
        state(0, 1), tmp_path
    ).execute_sync()
    assert len(list(tmp_path.iterdir())) == 15


def _saved_and_loaded(rank: int, world: int, folder: str, tp: int) -> Any:
    group = group_of(rank, world, tp)
    state_dict = state(rank, world, tp=tp)
    FullyParallelSaveStrategyWrapper(AsyncPieceSave(), group).save(state_dict, folder)
    comm.barrier()
    return [_loaded(rank, world, folder, tp, group, algorithm) for algorithm in ALGORITHMS]


def _replicas(state_dict: Any) -> list[Any]:
    return [leaf.replica_id for leaf in nested_values(state_dict)]


def _loaded(rank: int, world: int, folder: str, tp: int, group: Any, algorithm: str) -> Any:
    """Whether what was loaded is right and in the memory that was given, and which keys were
    read.
    """
    base = PieceLoad()
    wanted = state(rank, world, tp=tp, data=False)
    tensors = [leaf for leaf in nested_values(wanted) if isinstance(leaf, ShardedTensor)]
    places = [torch.zeros(leaf.local_shape, dtype=leaf.dtype) for leaf in tensors] if tp > 1 else []
    for leaf, place in zip(tensors, places, strict=False):
        leaf.data = place
    load = FullyParallelLoadStrategyWrapper(base, group, exchange_algo=algorithm)
    loaded = load.load(wanted, folder)
    assert _replicas(wanted) == _replicas(state(rank, world, tp=tp))
    assert load.cached_global_metadata == "metadata"
    assert load.cached_distribution is None
    in_place = all(
        leaf.data.data_ptr() == place.data_ptr()
        for leaf, place in zip(tensors, places, strict=False)
    )
    return equal(loaded, expected(rank, world, tp=tp)) and in_place, base.read


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "tp"),
    [
        (1, 1),
        (2, 1),
        (4, 2),
        pytest.param(8, 2, marks=pytest.mark.long),
        pytest.param(8, 1, marks=pytest.mark.long),
    ],
)
def test_everything_is_written_once_read_once_and_reaches_all_ranks(tmp_path, world, tp):
    results = run_ranks(world, _saved_and_loaded, str(tmp_path), tp)
    names = sorted(path.name.split("@")[0] for path in tmp_path.iterdir())
    assert names == sorted(
        f"{kind}~{tp_rank}" for kind in _kinds(12) for tp_rank in _offsets(kind, tp)
    )
    sizes = {f"w{index}": 64 * (index + 1) for index in range(12)}
    written = [0] * world
    for path in tmp_path.iterdir():
        written[int(path.name.split("@")[1])] += sizes.get(path.name.split("~")[0], 0)
    assert_balanced(written, sizes, tp)
    for number in range(len(ALGORITHMS)):
        assert all(results[rank][number][0] for rank in range(world))
        for tp_rank in range(tp):
            reads = [key for rank in range(tp_rank, world, tp) for key in results[rank][number][1]]
            assert sorted(reads) == sorted(_kinds(12))
        assert_balanced(
            [sum(sizes.get(key, 0) for key in of_rank[number][1]) for of_rank in results], sizes, tp
        )


def assert_balanced(loads: list[int], sizes: dict[str, int], tp: int) -> None:
    """Within the bound of largest-first scheduling."""
    fair = sum(sizes.values()) * tp / len(loads)
    assert max(loads) <= max(4 / 3 * fair, max(sizes.values())) and min(loads) > 0


def _kinds(n_tensors: int) -> list[str]:
    return [f"w{index}" for index in range(n_tensors)] + ["o0", "o1", "o2"]


def _offsets(kind: str, tp: int) -> list[int]:
    step = 8 * (int(kind[1:]) + 1) if kind[0] == "w" else 1
    return [tp_rank * step for tp_rank in range(tp)]


def _cached(rank: int, world: int, folder: str) -> Any:
    base = PieceLoad()
    save = FullyParallelSaveStrategyWrapper(PieceSave(), do_cache_distribution=True)
    load = FullyParallelLoadStrategyWrapper(base, do_cache_distribution=True)
    distributions = []
    for step in range(3):
        path = Path(folder, str(step))
        if rank == 0:
            path.mkdir()
        comm.barrier()
        make = _with_more if (rank, step) == (1, 2) else state
        save.save(make(rank, world), path)
        comm.barrier()
        loaded = load.load(make(rank, world, data=False), path)
        assert equal(loaded, dict_list_map_outplace(lambda leaf: leaf.data, make(rank, world)))
        distributions.append((save.cached_distribution, load.cached_distribution))
    assert distributions[0][0] is distributions[1][0] and distributions[0][1] is distributions[1][1]
    assert (
        distributions[2][0] is not distributions[1][0]
        and distributions[2][1] is not distributions[1][1]
    )
    return sorted(shard[0] for shard in distributions[2][0].main_rank_for_shard)


def _with_more(rank: int, world: int, *, data: bool = True) -> dict[str, Any]:
    state_dict = state(rank, world, data=data)
    tensor = ShardedTensor.from_rank_offsets("more", torch.arange(5.0))
    tensor.data = tensor.data if data else None
    return {**state_dict, "more": tensor}


@pytest.mark.dist
def test_a_cached_distribution_is_used_again_until_a_rank_changes_its_structure(tmp_path):
    everything = sorted(["more", *(f"w{index}" for index in range(12))])
    assert run_ranks(3, _cached, str(tmp_path)) == [everything] * 3


def _foreign_distribution(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="requires precomputed_distribution"):
        distribute_main_replicas_with_precomputed_distribution(state(rank, world), None, None)
    save = FullyParallelSaveStrategyWrapper(PieceSave(), do_cache_distribution=True)
    state_dict = state(rank, world)
    save.apply_saving_parallelization(state_dict)
    assert {
        leaf.replica_id for leaf in nested_values(state_dict) if isinstance(leaf, ShardedTensor)
    } == {
        0,
        1,
    }
    with pytest.raises(ValueError, match="different state dict and lacks more"):
        distribute_main_replicas_with_precomputed_distribution(
            _with_more(rank, world), None, save.cached_distribution
        )


@pytest.mark.dist
def test_a_distribution_of_another_state_dict_would_lose_tensors_and_is_refused():
    run_ranks(2, _foreign_distribution)


class Failing(PieceLoad):
    """Fails on rank 1: says that it did not find something, or leaves it out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        if comm.rank() == 1 and self.how == "raises":
            raise StorageError("the disk is gone")
        loaded = super().load(sharded_state_dict, checkpoint_dir)
        if comm.rank() == 1 and self.how == "leaves out":
            loaded.popitem()
        return loaded


class FailingSave(PieceSave):
    """Fails on rank 1."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        if comm.rank() == 1:
            raise StorageError("the disk is full")


def _failing(rank: int, world: int, folder: str, tp: int, how: str) -> str:
    group = group_of(rank, world, tp)
    FullyParallelSaveStrategyWrapper(PieceSave(), group).save(state(rank, world, tp=tp), folder)
    comm.barrier()
    try:
        if how == "save":
            FullyParallelSaveStrategyWrapper(FailingSave(), group).save(
                state(rank, world, tp=tp), folder
            )
        wanted = state(rank, world, tp=tp, data=False)
        FullyParallelLoadStrategyWrapper(Failing(how), group).load(wanted, folder)
    except CheckpointingException as err:
        return str(err)
    return "loaded"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "text"),
    [("raises", "the disk is gone"), ("leaves out", "did not return a requested shard")],
)
def test_a_failure_of_loading_is_raised_on_all_ranks(tmp_path, how, text):
    assert all(text in error for error in run_ranks(4, _failing, str(tmp_path), 2, how))


class Dying(PieceLoad):
    """Takes rank 1's process down, as the system does for want of memory."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        if comm.rank() == 1:
            os._exit(9)
        return super().load(sharded_state_dict, checkpoint_dir)


def _dying(rank: int, world: int, folder: str) -> None:
    FullyParallelSaveStrategyWrapper(PieceSave()).save(state(rank, world), folder)
    comm.barrier()
    try:
        FullyParallelLoadStrategyWrapper(Dying()).load(state(rank, world, data=False), folder)
    except WorkerError as err:
        Path(folder, f"seen_{rank}").write_text(str(err))


@pytest.mark.dist
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path):
    with pytest.raises(AssertionError, match="died"):
        run_ranks(3, _dying, str(tmp_path))
    for rank in (0, 2):
        assert "lost contact with another rank" in (tmp_path / f"seen_{rank}").read_text()


@pytest.mark.dist
def test_a_failure_of_saving_is_raised_on_all_ranks(tmp_path):
    assert all(
        "the disk is full" in text for text in run_ranks(4, _failing, str(tmp_path), 2, "save")
    )


def _holey(rank: int, world: int, folder: str) -> str:
    save = FullyParallelSaveStrategyWrapper(PieceSave(), do_cache_distribution=True)
    save.save(state(rank, world), folder)
    shards = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=1 + rank)}
    with pytest.raises(CheckpointingException) as caught:
        save.save(shards, folder)
    return str(caught.value)


@pytest.mark.dist
def test_shards_without_a_main_replica_are_an_error_of_every_save(tmp_path):
    first, other = run_ranks(2, _holey, str(tmp_path))
    assert first == other and "tensor w" in first


def _large(rank: int, world: int, tp: int, kinds: Any, *, data: bool = True) -> dict[str, Any]:
    """As ``state``, of tensors that are large beside the headers of their files; classes of
    ``kinds``.
    """
    tp_rank, dp_rank = rank % tp, rank // tp
    state_dict: dict[str, Any] = {}
    for index in range(9):
        values = torch.arange(LARGE * (index + 1)).add(10**6 * index + 10**5 * tp_rank)
        values = values.to([torch.int64, torch.float32, torch.int32][index % 3]).view(-1, 8)
        state_dict[f"w{index}"] = kinds.ShardedTensor.from_rank_offsets(
            f"w{index}",
            values if data else torch.zeros_like(values),
            (1, tp_rank, tp),
            replica_id=(0, 0, dp_rank),
        )
    value = {"tp": tp_rank, "noise": torch.arange(3)} if data else None
    state_dict["layers"] = [
        {"extra": kinds.ShardedObject("extra", value, (tp,), (tp_rank,), (0, 0, dp_rank))}
    ]
    return state_dict


LARGE = 1 << 12
"""Elements of the smallest tensor."""


def _is_loaded(loaded: dict[str, Any], rank: int, world: int, tp: int) -> bool:
    state_dict = _large(rank, world, tp, mapping)
    return (
        loaded["step"] == 7
        and equal(
            {"extra": _plain(loaded["layers"][0]["extra"])},
            {"extra": _plain(state_dict["layers"][0]["extra"].data)},
        )
        and all(
            torch.equal(loaded[key], state_dict[key].data) for key in state_dict if key[0] == "w"
        )
    )


def _plain(value: Any) -> Any:
    return {
        key: item.tolist() if isinstance(item, torch.Tensor) else item
        for key, item in value.items()
    }


def _torch_dist(rank: int, world: int, folder: str, tp: int, is_async: bool) -> list[bool]:
    group = group_of(rank, world, tp)
    base = TorchDistSaveShardedStrategy("torch_dist", 1)
    save = FullyParallelSaveStrategyWrapper(base, group, do_cache_distribution=True)
    for name in ("first", "second"):
        state_dict = {**_large(rank, world, tp, mapping), "step": 7}
        request = serialization.save(
            state_dict, Path(folder, name), save, async_sharded_save=is_async
        )
        if request is not None:
            request.execute_sync()
    answers = []
    for algorithm in ALGORITHMS:
        load = FullyParallelLoadStrategyWrapper(
            TorchDistLoadShardedStrategy(), group, exchange_algo=algorithm
        )
        wanted = _large(rank, world, tp, mapping, data=False)
        loaded = serialization.load(wanted, Path(folder, "second"), load)
        answers.append(_is_loaded(loaded, rank, world, tp))
    return answers


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "tp", "is_async"),
    [
        pytest.param(1, 1, False, marks=pytest.mark.long),
        (2, 1, True),
        (4, 2, False),
        pytest.param(8, 2, True, marks=pytest.mark.long),  # more replicas of what the others show
    ],
)
def test_torch_dist_files_are_of_about_one_size_and_load_bit_for_bit(tmp_path, world, tp, is_async):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    assert run_ranks(world, _torch_dist, str(tmp_path), tp, is_async) == [[True] * 3] * world
    sizes = [LARGE * (index + 1) * [8, 4, 4][index % 3] for index in range(9)]
    fair = sum(sizes) * tp / world
    for name in ("first", "second"):
        files = dict.fromkeys(range(world), 0)  # bytes of each rank: it writes one file or more
        for path in (tmp_path / name).glob("*.distcp"):
            files[int(path.stem.split("_")[2])] += path.stat().st_size
        headers = 2048 * len(sizes)
        assert max(files.values()) <= max(4 / 3 * fair, max(sizes)) + headers
        assert sum(sizes) * tp <= sum(files.values()) <= sum(sizes) * tp + world * headers
        assert min(files.values()) > min(sizes)


def _error_of_load(rank: int, world: int, folder: str) -> str:
    target = Path(folder, "target")
    if rank == 0:
        target.mkdir()
    comm.barrier()
    base = TorchDistSaveShardedStrategy("torch_dist", 1)
    FullyParallelSaveStrategyWrapper(base).save(state(rank, world), target)
    wanted = state(rank, world, data=False)
    if rank == 1:
        wanted["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(3))
    load = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    with pytest.raises(dcp.CheckpointException) as caught:
        load.load(wanted, target)
    assert isinstance(caught.value, MissingShardError) and list(caught.value.failures) == [1]
    return str(caught.value)


@pytest.mark.dist
def test_a_key_that_one_rank_misses_is_the_same_error_on_all_ranks(tmp_path):
    other, own = run_ranks(2, _error_of_load, str(tmp_path))
    assert other.startswith("rank 1 failed: the checkpoint has no such tensor")
    assert own.startswith("the checkpoint has no such tensor")


HOLDERS = {"a": [0], "b": [0, 1, 2, 3], "c": [2, 0], "d": [1, 0, 3], "e": [3]}
"""The ranks that hold each tensor, that of the main replica first; groups are {0, 2} and {1, 3}."""
SAVERS = {"a": 0, "b": 2, "c": 0, "d": 1, "e": 3}
"""By the documented rule: few holders first, then by key, each to the least loaded holder."""


class Recorder(TorchDistLoadShardedStrategy):
    """Notes the keys that this rank reads."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        self.keys = sorted(leaf.key for leaf in nested_values(sharded_state_dict))
        return super().load(sharded_state_dict, checkpoint_dir)


def _held(rank: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(4), replica_id=ranks.index(rank))
        for key, ranks in HOLDERS.items()
        if rank in ranks
    }
    return {**tensors, "o": ShardedObject("o", {"rank": 2}, (1,), (0,), int(rank != 2))}


def _readers(rank: int, world: int, folder: str, is_cached: bool) -> Any:
    group = group_of(rank, world, 2)
    base = TorchDistSaveShardedStrategy("torch_dist", 1)
    save = FullyParallelSaveStrategyWrapper(base, group, is_cached)
    parts = _held(rank)
    for name in ("first", "second"):
        save.save(parts, Path(folder, name))
    recorder = Recorder()
    FullyParallelLoadStrategyWrapper(recorder, group, is_cached).load(parts, Path(folder, "second"))
    main_keys = {leaf.key for leaf in parts.values() if leaf.replica_id == 0}
    return main_keys - {"o"}, set(recorder.keys)


@pytest.mark.dist
@pytest.mark.parametrize("is_cached", [False, True])
def test_ranks_read_what_they_saved_and_then_what_other_groups_saved(tmp_path, is_cached):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    results = run_ranks(4, _readers, str(tmp_path), is_cached)
    # The caller's replica ids name the main ranks, also after a second save and a load.
    assert [main_keys for main_keys, _ in results] == [{"a", "c"}, {"d"}, {"b"}, {"e"}]
    for name in ("first", "second"):
        storage = dcp.FileSystemReader(tmp_path / name).read_metadata().storage_data
        files = {index.fqn: place.relative_path for index, place in storage.items()}
        assert {key: int(files[key].split("_")[2]) for key in SAVERS} == SAVERS
    # d on rank 0 and b on rank 1 are from the other group; so is the object on rank 1.
    read_keys = [keys for _, keys in results]
    assert read_keys == [{"a", "c", "d"}, {"b", "d", "o"}, {"b", "o"}, {"e"}]


def _read_by_megatron(rank: int, world: int, folder: str, tp: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = importlib.import_module("megatron.core.dist_checkpointing")
    group = group_of(rank, world, tp)
    save = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    serialization.save({**_large(rank, world, tp, mapping), "step": 7}, folder, save)
    return _is_loaded(
        theirs.load(_large(rank, world, tp, theirs, data=False), folder), rank, world, tp
    )


@pytest.mark.dist
@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_megatron_core_reads_what_the_ranks_wrote(tmp_path, world, tp):
    assert run_ranks(world, _read_by_megatron, str(tmp_path), tp) == [True] * world


def _saved_with_caches_that_differ(rank: int, world: int, folder: str) -> list[str]:
    wrapped = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=rank == 1), None, rank == 1
    )
    plain = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=rank == 0)
    values = []
    for number, strategy in enumerate((wrapped, wrapped, plain, plain)):
        target = Path(folder, str(number))
        if rank == 0:
            target.mkdir()
        comm.barrier()
        serialization.save({"w": part_of("w", (8, 2), (0, rank, world))}, target, strategy)
        loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), None, rank == 0)
        loaded = serialization.load(
            {"w": part_of("w", (8, 2), is_filled=False, replica_id=rank)}, target, loader
        )
        values.append(bool(torch.equal(loaded["w"], part_of("w", (8, 2)).data)))
    wrong = part_of("w", (8, 2), is_filled=False, replica_id=rank)
    if rank == 1:
        wrong.data = torch.zeros(2, 2)
    try:
        serialization.load(
            {"w": wrong}, target, FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
        )
    except CheckpointingException as err:
        values.append("the data has 4 elements" in str(err))
    return values


@pytest.mark.dist
def test_ranks_that_cache_and_those_that_do_not_work_together_and_data_of_a_wrong_size_are_refused(
    tmp_path,
):
    assert run_ranks(2, _saved_with_caches_that_differ, str(tmp_path)) == [[True] * 5] * 2
