"""The strategies of torch_dist, with the real readers and writers of the same files on the other
end.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from core.dist_checkpointing import load, save
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from core.dist_checkpointing.strategies._torch.planners import MCoreSavePlanner
from core.dist_checkpointing.strategies._torch.state import group_by_key, mcore_to_pyt_state_dict
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from core.dist_checkpointing.strategies.torch import (
    MCoreMetadata,
    MCoreSavePlan,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from core.dist_checkpointing.torch_dcp.torch_metadata import read_torch_metadata
from core.errors import CheckpointingException, MissingShardError, StorageError
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.support.real_readers import of_tensor, read_dcp

SHAPES = {
    "column": ((8, 6), torch.float32),
    "row": ((6, 8), torch.bfloat16),
    "grid": ((4, 8), torch.float16),
    "layers": ((4, 3, 5), torch.float32),
    "optimizer.flat": ((4, 6), torch.float32),
    "optimizer.step": ((), torch.int64),
    "same": ((3,), torch.uint8),
}


def saves(**options: object) -> TorchDistSaveShardedStrategy:
    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)


def state_of(rank: int, world: int, *, is_filled: bool = True) -> dict[str, object]:
    """A state of tensors and objects, cut otherwise for every number of ranks; ``same`` is
    replicated.
    """
    n_cells, layers = 24, 4 // world
    rows = 2 if world == 4 else 1
    start, stop = (round(n_cells * at / world) + (0 < at < world) for at in (rank, rank + 1))

    def part(key: str, *offsets: tuple[int, int, int], **more: object) -> ShardedTensor:
        shape, dtype = SHAPES[key]
        return part_of(key, shape, *offsets, dtype=dtype, is_filled=is_filled, **more)

    flat = flat_part_of(
        "optimizer.flat", SHAPES["optimizer.flat"][0], start, stop, is_filled=is_filled
    )
    return {
        "model": {
            "column": part("column", (0, rank, world)),
            "row": part("row", (1, rank, world)),
            "grid": part("grid", (0, rank % rows, rows), (1, rank // rows, world // rows)),
            "layers": [
                part("layers", (0, rank * layers + n, 4), prepended=1) for n in range(layers)
            ],
            "same": part("same", replica_id=(0, rank)),
        },
        "optimizer": {"flat": flat, 0: {"step": part("optimizer.step", replica_id=rank)}},
        "rng": ShardedObject(
            "rng", {"seed": 7 + rank, "pair": (1, 2.5)} if is_filled else None, (world,), (rank,)
        ),
        "once": ShardedObject(
            "optimizer.once", ["a", None] if is_filled else None, (1,), (0,), replica_id=rank
        ),
    }


def differences(loaded: object, wanted: object, path: str = "") -> list[str]:
    """Where what was loaded is not what was saved."""
    if isinstance(wanted, dict):
        return [d for key in wanted for d in differences(loaded[key], wanted[key], f"{path}/{key}")]
    if isinstance(wanted, list):
        assert isinstance(loaded, list) and len(loaded) == len(wanted)
        return [
            d
            for n, (a, b) in enumerate(zip(loaded, wanted, strict=True))
            for d in differences(a, b, f"{path}/{n}")
        ]
    if isinstance(wanted, ShardedObject):
        return [] if loaded == wanted.data else [path]
    same = (
        torch.equal(loaded, wanted.data)
        and loaded.dtype == wanted.dtype
        and loaded.shape == wanted.data.shape
    )
    return [] if same else [path]


def _save(rank: int, world: int, folder: Path, options: dict[str, object]) -> None:
    saves(**options).save(state_of(rank, world), folder)


def _load(rank: int, world: int, folder: Path, with_objects: bool) -> list[str]:
    asked, wanted = state_of(rank, world, is_filled=False), state_of(rank, world)
    if not with_objects:
        del asked["rng"], wanted["rng"]
    return differences(TorchDistLoadShardedStrategy().load(asked, folder), wanted)


def on_ranks(n: int, function, *args: object) -> list:
    return [function(0, 1, *args)] if n == 1 else run_ranks(n, function, *args)


def check_tensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    assert tensors.keys() == SHAPES.keys()
    for key, (shape, dtype) in SHAPES.items():
        want = global_tensor(key, shape, dtype)
        data = want.flatten().view(torch.uint8).numpy().tobytes()
        assert tensors[key] == (str(dtype).removeprefix("torch."), shape, data), key


@pytest.mark.dist
@pytest.mark.first(1)
@pytest.mark.parametrize("n_saved", [2, 1, 4])
def test_what_is_saved_is_loaded_at_any_number_of_ranks_and_read_by_torch(n_saved, tmp_path):
    on_ranks(n_saved, _save, tmp_path, {})
    assert {file.name for file in tmp_path.iterdir()} == {
        ".metadata",
        *(f"__{rank}_{number}.distcp" for rank in range(n_saved) for number in range(2)),
    }
    for n_loaded in (1, 2, 4):
        assert on_ranks(n_loaded, _load, tmp_path, n_loaded == n_saved) == [[]] * n_loaded
    check_tensors(read_dcp(tmp_path))


def test_loading_fills_given_data_in_place_and_makes_what_is_missing(tmp_path):
    saves().save({"w": part_of("w", (4, 3)), "b": part_of("b", (4,))}, tmp_path)
    given = torch.nn.Parameter(torch.zeros(3, 4).t())
    asked = {
        "w": ShardedTensor.from_rank_offsets("w", given),
        "b": part_of("b", (4,)).without_data(),
    }
    loaded = TorchDistLoadShardedStrategy().load(asked, tmp_path)
    assert loaded["w"].data_ptr() == given.data_ptr() and not loaded["w"].requires_grad
    assert torch.equal(given.data, global_tensor("w", (4, 3)))
    assert torch.equal(loaded["b"], global_tensor("b", (4,)))


def test_a_tensor_of_another_shape_is_an_error_unless_a_mismatch_is_allowed(tmp_path):
    saves().save({"w": part_of("w", (4, 3))}, tmp_path)
    load = TorchDistLoadShardedStrategy().load
    with pytest.raises(CheckpointingException, match="tensor w"):
        load({"w": part_of("w", (6, 3))}, tmp_path)
    for rows in (2, 6):
        asked = part_of("w", (rows, 3), is_filled=False, allow_shape_mismatch=True)
        want = torch.zeros(rows, 3)
        want[:4] = global_tensor("w", (4, 3))[:rows]
        assert torch.equal(load({"w": asked}, tmp_path)["w"], want)


def test_what_the_checkpoint_lacks_is_named(tmp_path):
    saves().save({"w": part_of("w", (4,)), "o": ShardedObject("o", 1, (2,), (0,))}, tmp_path)
    load = TorchDistLoadShardedStrategy().load
    with pytest.raises(CheckpointingException, match="no such tensor.*tensor v"):
        load({"v": part_of("v", (4,))}, tmp_path)
    with pytest.raises(CheckpointingException, match="o/shard_1_2"):
        load({"o": ShardedObject("o", None, (2,), (1,))}, tmp_path)


def test_metadata_are_listed_by_key(tmp_path):
    saves().save(state_of(0, 1), tmp_path)
    strategy = TorchDistLoadShardedStrategy()
    tensors = strategy.load_tensors_metadata(tmp_path)
    assert {key: (item.global_shape, item.dtype, item.data) for key, item in tensors.items()} == {
        key: (shape, dtype, None) for key, (shape, dtype) in SHAPES.items()
    }
    assert all(item.local_shape == item.global_shape for item in tensors.values())
    listed = strategy.load_sharded_metadata(tmp_path)
    objects = {key: item for key, item in listed.items() if isinstance(item, ShardedObject)}
    assert (
        set(objects)
        == {"rng/shard_0_1", "optimizer.once/shard_0_1"}
        == {o.unique_key for o in objects.values()}
    )
    assert listed.keys() - objects.keys() == SHAPES.keys()
    assert strategy.cached_global_metadata is None
    strategy.load({"same": part_of("same", (3,), dtype=torch.uint8)}, tmp_path)
    metadata = strategy.cached_global_metadata
    assert set(metadata.state_dict_metadata) == set(listed)
    again = strategy.load_tensors_metadata(tmp_path, metadata)
    assert {key: (item.global_shape, item.dtype) for key, item in again.items()} == dict(SHAPES)


def test_another_backend_or_version_is_refused():
    strategy = TorchDistLoadShardedStrategy()
    strategy.check_backend_compatibility("torch_dist")
    strategy.check_version_compatibility(1)
    with pytest.raises(
        CheckpointingException,
        match="reads backend 'torch_dist', but the checkpoint has backend 'zarr'",
    ):
        strategy.check_backend_compatibility("zarr")
    with pytest.raises(
        CheckpointingException,
        match="reads version 1 of its backend, but the checkpoint has version 2",
    ):
        strategy.check_version_compatibility(2)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    for state, reason in (
        ({"w": torch.zeros(3)}, "cannot save or load a Tensor"),
        ({"w": part_of("w", (4,)).without_data()}, "no data.*tensor w"),
        (
            {"a": part_of("w", (4,)), "b": part_of("w", (4,))},
            "two main replicas of the same shard.*tensor w",
        ),
        (
            {"a": ShardedObject("o", 1, (1,), (0,)), "b": ShardedObject("o", 2, (1,), (0,))},
            "two main replicas",
        ),
    ):
        with pytest.raises(CheckpointingException, match=reason):
            saves().save(state, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointingException, match="thread_count must be at least 1"):
        saves(thread_count=0)
    for hint in ("", "a/b"):
        with pytest.raises(CheckpointingException, match="separation.hint"):
            saves(separation_hint=hint)


def _fail(rank: int, world: int, folder: Path) -> str:
    state = state_of(rank, world)
    if rank == 1:
        state["model"]["column"].data = None
    try:
        saves().save(state, folder)
    except CheckpointingException as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
def test_what_one_rank_cannot_save_fails_on_every_rank(tmp_path):
    errors = run_ranks(3 - 1, _fail, tmp_path)
    assert all("the tensor has no data to save" in text for text in errors), errors
    assert list(tmp_path.iterdir()) == []


def _save_into_the_way(rank: int, world: int, folder: Path) -> str:
    try:
        saves().save(state_of(rank, world), folder)
    except CheckpointingException as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
def test_what_one_rank_cannot_write_fails_on_every_rank_and_leaves_no_metadata(tmp_path):
    (tmp_path / "__1_0.distcp").mkdir()
    errors = run_ranks(2, _save_into_the_way, tmp_path)
    assert "rank 1 failed" in errors[0] and all("__1_0.distcp" in text for text in errors), errors
    assert not (tmp_path / ".metadata").exists()


def _save_twice(rank: int, world: int, folder: Path, kind: str) -> str:
    state: dict[str, object] = {"x": part_of("x", (4,), (0, rank, world))}
    state["twice"] = (
        part_of("w", (4,)) if kind == "tensor" else ShardedObject("w", rank, (1,), (0,))
    )
    try:
        saves().save(state, folder)
    except CheckpointingException as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["tensor", "object"])
def test_a_shard_with_main_replicas_on_two_ranks_is_refused_on_both(kind, tmp_path):
    errors = run_ranks(2, _save_twice, tmp_path, kind)
    assert all("ranks 0 and 1 both save the same shard (tensor w" in text for text in errors), (
        errors
    )
    assert list(tmp_path.iterdir()) == []


def _load_missing(rank: int, world: int, folder: Path) -> str:
    asked = {"w": part_of("w" if rank == 0 else "v", (4,))}
    try:
        TorchDistLoadShardedStrategy().load(asked, folder)
    except CheckpointingException as err:
        return str(err)
    return "nothing"


@pytest.mark.dist
def test_what_one_rank_cannot_load_fails_on_every_rank(tmp_path):
    saves().save({"w": part_of("w", (4,))}, tmp_path)
    assert all("no such tensor" in text for text in run_ranks(2, _load_missing, tmp_path))


def _save_replicas(rank: int, world: int, folder: Path) -> None:
    """Every rank holds all of ``w``, none of them as the main replica, and two parts of ``v``."""
    state = {
        "w": part_of("w", (4, 2), replica_id=rank + 1),
        "o": ShardedObject("o", "x", (1,), (0,), replica_id=1),
    }
    state["v"] = [part_of("v", (6,), (0, (rank + n) % 3, 3), replica_id=n) for n in range(2)]
    saves(keep_only_main_replica=False).save(state, folder)


@pytest.mark.dist
def test_without_main_replicas_only_each_shard_is_written_once(tmp_path):
    run_ranks(3, _save_replicas, tmp_path)
    tensors = read_dcp(tmp_path)
    assert tensors["w"][2] == global_tensor("w", (4, 2)).numpy().tobytes()
    assert tensors["v"][2] == global_tensor("v", (6,)).numpy().tobytes()
    assert TorchDistLoadShardedStrategy().load(
        {"o": ShardedObject("o", None, (1,), (0,))}, tmp_path
    ) == {"o": "x"}


def _save_often(rank: int, world: int, folder: Path) -> list[bool]:
    """Three saves of one structure, then one of another; whether each used what was agreed on
    before.
    """
    strategy = saves(cached_metadata=True)
    earlier_images, reused = [], []
    for number, more in enumerate(((), (), (), ("extra",))):
        target = folder / str(number)
        if rank == 0:
            target.mkdir()
        dist.barrier()
        state = state_of(rank, world)
        for key in more:
            state[key] = part_of(key, (world * 2,), (0, rank, world))
        strategy.save(state, target)
        images = strategy._agreement.layout
        reused.append(any(images is earlier for earlier in earlier_images))
        earlier_images.append(images)
    return reused


@pytest.mark.dist
def test_saves_of_one_structure_share_what_was_agreed_on(tmp_path):
    assert run_ranks(2, _save_often, tmp_path) == [[False, True, True, False]] * 2
    for number in range(4):
        tensors = read_dcp(tmp_path / str(number))
        assert ("extra" in tensors) == (number == 3)
        tensors.pop("extra", None)
        check_tensors(tensors)


def test_a_later_save_of_other_values_with_the_same_strategy_has_these(tmp_path):
    strategy = saves(cached_metadata=True)
    for value in (1.0, 2.0):
        folder = tmp_path / str(value)
        folder.mkdir()
        strategy.save({"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}, folder)
        assert torch.equal(
            torch.frombuffer(bytearray(read_dcp(folder)["w"][2]), dtype=torch.float32),
            torch.full((4,), value),
        )


def test_the_files_of_a_rank_have_the_entries_that_torch_puts_there(tmp_path):
    state = {
        f"t{n}": ShardedTensor.from_rank_offsets(f"t{n}", torch.ones(n, 7)) for n in range(1, 12)
    }
    (tmp_path / "ours").mkdir()
    saves(thread_count=3).save(state, tmp_path / "ours")
    plain = {key: tensor.data for key, tensor in state.items()}
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(tmp_path / "torch", thread_count=3))

    def keys_by_file(folder):
        stored = dcp.FileSystemReader(folder).read_metadata().storage_data
        files = {}
        for index, info in stored.items():
            files.setdefault(info.relative_path, set()).add(index.fqn)
        return files

    assert keys_by_file(tmp_path / "ours") == keys_by_file(tmp_path / "torch")


@pytest.mark.dist
@pytest.mark.parametrize("n", [1, 2])
def test_a_separation_hint_keeps_files_apart_and_they_can_be_removed(n, tmp_path):
    on_ranks(n, _save, tmp_path, {"separation_hint": "optimizer", "thread_count": 4})
    other_files = {file.name: file.read_bytes() for file in tmp_path.glob("__*")}
    assert other_files.keys() == {
        f"__{rank}_{number}.distcp" for rank in range(n) for number in (0, 1)
    }
    apart = {f"optimizer__{rank}_{number}.distcp" for rank in range(n) for number in (2, 3)}
    assert {file.name for file in tmp_path.iterdir()} == {".metadata", *other_files, *apart}
    assert on_ranks(n, _load, tmp_path, True) == [[]] * n
    TorchDistLoadShardedStrategy().remove_sharded_tensors(tmp_path, "optimizer")
    assert {
        file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != ".metadata"
    } == other_files
    metadata = TorchDistLoadShardedStrategy().load_sharded_metadata(tmp_path)
    remaining = {key for key in SHAPES if not key.startswith("optimizer")}
    assert metadata.keys() == {*remaining, *(f"rng/shard_{number}_{n}" for number in range(n))}
    assert read_dcp(tmp_path).keys() == remaining


def test_removing_leaves_other_entries_of_the_same_file_as_they_are(tmp_path, caplog):
    saves(thread_count=1).save(state_of(0, 1), tmp_path)
    before = read_dcp(tmp_path)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    load = TorchDistLoadShardedStrategy()
    load.remove_sharded_tensors(str(tmp_path), "layers")
    assert (tmp_path / "__0_0.distcp").read_bytes() == data
    before.pop("layers")
    assert read_dcp(tmp_path) == before
    stated = (tmp_path / ".metadata").read_bytes()
    with caplog.at_level(logging.WARNING):
        load.remove_sharded_tensors(tmp_path, "nothing")
    assert "'nothing'" in caplog.text and (tmp_path / ".metadata").read_bytes() == stated
    with pytest.raises(CheckpointingException, match="empty prefix"):
        load.remove_sharded_tensors(tmp_path, "")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]


def test_the_old_metadata_stay_where_new_ones_cannot_be_written(tmp_path, monkeypatch):
    saves(separation_hint="optimizer").save(state_of(0, 1), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def refuse(*names: object) -> None:
        raise OSError(5, "no")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(CheckpointingException, match="cannot write"):
        TorchDistLoadShardedStrategy().remove_sharded_tensors(tmp_path, "optimizer")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_names_of_old_classes_are_there():
    assert MCoreMetadata() is not None
    assert MCoreSavePlan() is not None


def _caught_by_scripts(work: Any) -> list[Any]:
    """What a script that was written for torch's checkpoints sees of a failure."""
    with pytest.raises(CheckpointException) as caught:
        work()
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    kinds = [isinstance(error, kind) for kind in (MissingShardError, StorageError)]
    own = {rank: type(failure).__name__ for rank, (failure, _) in error.failures.items()}
    return [kinds, error.exit_code, own, str(error)]


def _failing_ranks(rank: int, world: int, folder: str) -> list[list[Any]]:
    part = part_of("w", (8,), (0, rank, world))
    if rank == 0:
        for name in ("good", "bad", "late"):
            Path(folder, name).mkdir()
    dist.barrier()
    save({"w": part}, f"{folder}/good")
    extra = {"n": part_of("new", (2,), is_filled=False)} if rank == 1 else {}
    errors = [_caught_by_scripts(lambda: load({"w": part, **extra}, f"{folder}/good"))]

    class Hindered(TorchDistSaveShardedStrategy):
        def _prepare(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            if rank == 1:  # in the way of the file that the rank has to write
                (Path(checkpoint_dir) / "__1_0.distcp").mkdir()
            return super()._prepare(sharded_state_dict, checkpoint_dir)

    strategy = Hindered("torch_dist", 1)
    errors.append(_caught_by_scripts(lambda: save({"w": part}, f"{folder}/bad", strategy)))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        save({"w": part}, f"{folder}/late", strategy, async_sharded_save=True)
    )
    errors.append(_caught_by_scripts(lambda: queue.maybe_finalize_async_calls(blocking=True)))
    return errors


@pytest.mark.dist
def test_failures_are_also_those_of_torch_by_rank(tmp_path):
    for rank, (missing, bad, late) in enumerate(run_ranks(2, _failing_ranks, str(tmp_path))):
        assert missing[:3] == [[True, False], 3, {1: "MissingShardError"}]
        assert missing[3].startswith("rank 1 failed: " * (rank == 0) + "the checkpoint has no such")
        for failure in (bad, late):
            assert failure[:3] == [[False, True], 6, {1: "StorageError"}]
            assert "__1_0.distcp" in failure[3]
    assert not any((tmp_path / name / "metadata.json").exists() for name in ("bad", "late"))


SPLITS = ((4, 0, 0, 2), (0, 1, 0, 5))
"""Rows of each of two shards of each of two ranks."""


def _uneven(rank: int, world: int, folder: str) -> list[Any]:
    def shards(split: tuple[int, ...], *, is_filled: bool) -> dict[str, Any]:
        full = global_tensor("w", (6, 2))
        tensors = {}
        for number in (2 * rank, 2 * rank + 1):
            start, n = sum(split[:number]), split[number]
            data = full[start : start + n].clone() if is_filled else torch.zeros(n, 2)
            tensors[f"w{number}"] = ShardedTensor(
                "w", data, data.dtype, tuple(data.shape), (6, 2), (start, 0), None
            )
        return tensors

    if rank == 0:
        for name in ("plain", "parallel"):
            Path(folder, name).mkdir()
    dist.barrier()
    save(shards(SPLITS[0], is_filled=True), f"{folder}/plain")
    save(
        shards(SPLITS[0], is_filled=True),
        f"{folder}/parallel",
        FullyParallelSaveStrategyWrapper(saves()),
    )
    loaded = [load(shards(SPLITS[1], is_filled=False), f"{folder}/plain")]
    parallel = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(f"{folder}/parallel")
    )
    loaded.append(load(shards(SPLITS[1], is_filled=False), f"{folder}/parallel", parallel))
    return [{key: value.tolist() for key, value in state.items()} for state in loaded]


@pytest.mark.dist
def test_shards_without_elements_share_an_offset_with_others(tmp_path):
    tensor = global_tensor("w", (6, 2))
    rows = tensor.tolist()
    first, second = run_ranks(2, _uneven, str(tmp_path))
    assert first == [{"w0": [], "w1": rows[:1]}] * 2
    assert second == [{"w2": [], "w3": rows[1:]}] * 2
    for name in ("plain", "parallel"):
        assert read_dcp(tmp_path / name)["w"] == of_tensor(tensor)


def test_views_of_large_tensors_take_no_more_space_than_they_show(tmp_path):
    view = torch.ones(1_000_000)[:10]
    save({"w": ShardedTensor.from_rank_offsets("w", view)}, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 10_000


def _resume(rank: int, world: int, folder: Path) -> list[bool]:
    """Save, then continue as a new job does: with the metadata of the loaded checkpoint."""
    _save(rank, world, folder / "first", {"cached_metadata": True})
    loads, resumed = TorchDistLoadShardedStrategy(), saves(cached_metadata=True)
    loads.load(state_of(rank, world, is_filled=False), folder / "first")
    resumed.cached_global_metadata = loads.cached_global_metadata
    reused = []
    # The size of an object may differ from that in the loaded checkpoint.
    for name, seed in (("second", 10**9), ("third", 7 + rank)):
        state = state_of(rank, world)
        state["rng"].data["seed"] = seed
        resumed.save(state, folder / name)
        reused.append(resumed.validated_loaded_metadata_reuse)
    assert resumed.cached_global_metadata is loads.cached_global_metadata
    # Another state is planned again, also if it differs on one rank only.
    other = saves(cached_metadata=True)
    other.cached_global_metadata = loads.cached_global_metadata
    state = state_of(rank, world)
    state["more"] = part_of("more", (3,), is_filled=True) if rank == 1 else {}
    other.save(state, folder / "other")
    return [*reused, other.validated_loaded_metadata_reuse]


@pytest.mark.dist
def test_a_job_that_continues_reuses_what_the_checkpoint_records(tmp_path):
    for name in ("first", "second", "third", "other"):
        (tmp_path / name).mkdir()
    assert run_ranks(2, _resume, tmp_path) == [[True, False, False]] * 2
    # torch reads the recorded plans, and they equal those of Megatron's own planner.
    plans = dcp.FileSystemReader(tmp_path / "first").read_metadata().all_local_plans
    assert plans == dcp.FileSystemReader(tmp_path / "second").read_metadata().all_local_plans
    assert plans == read_torch_metadata(tmp_path / "first").all_local_plans
    for rank, plan in enumerate(plans):
        planner = MCoreSavePlanner(flatten_state_dict=False)
        leaves = group_by_key(state_of(rank, 2), only_main_replicas=True)
        planner.set_up_planner(mcore_to_pyt_state_dict(leaves), is_coordinator=rank == 0)
        own = planner.create_local_plan()
        assert len(plan.items) == len(own.items)
        assert all(item in own.items for item in plan.items)
        assert (plan.storage_data, plan.planner_data) == (None, own.planner_data)
    for name in ("first", "third"):
        assert run_ranks(2, _load, tmp_path / name, True) == [[], []]
        check_tensors(read_dcp(tmp_path / name))
