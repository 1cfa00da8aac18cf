"""Strategies that scripts write themselves, of the steps in ``filesystem_async`` and
``state_dict_saver``.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from core.dist_checkpointing import ShardedObject, ShardedTensor, load, save
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from core.errors import UnsupportedError, UsageError, WorkerError
from tests.dist_checkpointing.ranks import run_ranks

N_KEYS = 5


class OwnStrategy(TorchDistSaveShardedStrategy):
    """What scripts make: torch's files through the documented steps, plans kept from save to
    save.
    """

    kept: tuple[Any, Any, bool] = (None, None, False)
    metadata: Any = None
    plans: Any = None

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        leaves, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = FileSystemWriterAsync(
            checkpoint_dir, separation_hint=self.separation_hint, thread_count=self.thread_count
        )
        planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        (_, metadata, wrapper), central, local, is_same, is_loaded = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(leaves), writer, None, 0, planner, self.kept, self.plans
        )
        self.is_loaded, self.has_planned = is_loaded, metadata is not None
        self.kept = (
            (central, local, is_same) if self.use_cached_ckpt_structure else (None, None, False)
        )
        self.metadata = metadata or self.metadata
        function, preload, args = writer.get_save_function_and_args()

        def finish() -> None:
            save_state_dict_async_finalize(writer, self.metadata, wrapper)

        return AsyncRequest(function, args, [finish], preload_fn=preload)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


def state(rank: int, world: int, fill: float) -> dict[str, Any]:
    """Row ``rank`` of five tensors, which are views here, and an object of this rank."""
    state_dict: dict[str, Any] = {}
    for number in range(N_KEYS):
        rows = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)[1] + 100 * rank + 1000 * number + fill
        key = f"{'optim' if number >= 3 else 'model'}.{number}"
        state_dict[key] = ShardedTensor.from_rank_offsets(
            key, torch.stack([rows, rows])[0], (0, rank, world)
        )
    state_dict["rng"] = ShardedObject("rng", [rank, fill], (world,), (rank,))
    return state_dict


def check(rank: int, world: int, folder: Path, fill: float) -> None:
    """It is there what ``state`` says."""
    loaded = load(state(rank, world, -1.0), folder)
    for key, tensor in state(rank, world, fill).items():
        if key != "rng":
            assert torch.equal(loaded[key], tensor.data), key
    assert loaded["rng"] == [rank, fill]


def _saves(rank: int, world: int, folder: Path, way: str) -> None:
    if rank == 0:
        folder.mkdir()
    comm.barrier()
    strategy = OwnStrategy("torch_dist", 1, thread_count=4, separation_hint="optim")
    if way == "sync":
        save(state(rank, world, 1.0), folder, strategy)
    else:
        calls = AsyncCallsQueue(persistent=way == "persistent")
        request = save(state(rank, world, 1.0), folder, strategy, async_sharded_save=True)
        assert request is not None
        calls.schedule_async_request(request)
        calls.maybe_finalize_async_calls(blocking=True)
        calls.close()
    check(rank, world, folder, 1.0)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("n", "way"),
    [
        (1, "sync"),
        (2, "sync"),
        (2, "temporal"),
        pytest.param(2, "persistent", marks=pytest.mark.long),
    ],
)
def test_a_strategy_of_the_documented_steps_saves_what_everybody_loads(
    n: int, way: str, tmp_path: Path
) -> None:
    run_ranks(n, _saves, tmp_path / "c", way)
    names = {path.name for path in (tmp_path / "c").glob("*.distcp")}
    wanted = [("", 0), ("", 1), ("optim", 2), ("optim", 3)]
    assert names == {
        f"{hint}__{rank}_{number}.distcp" for rank in range(n) for hint, number in wanted
    }
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert sum(key.startswith("optim") for key in metadata.state_dict_metadata) == N_KEYS // 2


def _keeps_plans(rank: int, world: int, folder: Path) -> list[bool]:
    strategy = OwnStrategy("torch_dist", 1, cached_metadata=True)
    planned = []
    for number in range(4):
        place = folder / str(number)
        if rank == 0:
            place.mkdir(parents=True)
        comm.barrier()
        save(state(rank, world, float(number)), place, strategy)
        check(rank, world, place, float(number))
        planned.append(strategy.has_planned)
    fresh = OwnStrategy("torch_dist", 1)
    fresh.plans = comm.broadcast(getattr(strategy.metadata, "all_local_plans", None))
    fresh.metadata = strategy.metadata
    fresh.async_save(state(rank, world, 9.0), folder / "0")
    assert fresh.is_loaded and not fresh.has_planned
    fresh.async_save(
        {**state(rank, world, 9.0), "more": state(rank, world, 0.0)["model.0"]}, folder / "0"
    )
    return planned


@pytest.mark.dist
def test_plans_that_are_known_are_not_sent_again(tmp_path: Path) -> None:
    coordinator, other = run_ranks(2, _keeps_plans, tmp_path)
    assert coordinator == [True, True, False, False] and not any(other)


def _loses_a_directory(rank: int, world: int, folder: Path) -> str:
    writer = FileSystemWriterAsync(folder / str(rank))
    planned = save_state_dict_async_plan({"w": torch.zeros(2), f"o{rank}": [rank]}, writer)
    function, preload, args = writer.get_save_function_and_args()
    if function is not None and preload is not None:
        if rank == 1:
            shutil.rmtree(folder / "1")
        expected = (
            pytest.raises(WorkerError, match="FileNotFoundError") if rank == 1 else nullcontext()
        )
        with expected:
            function(args[0], preload(), *args[2:])
    with pytest.raises(CheckpointException) as caught:
        save_state_dict_async_finalize(*planned[0])
    assert "FileNotFoundError" in str(caught.value)
    return str(list(caught.value.failures))


@pytest.mark.dist
def test_a_rank_that_cannot_write_fails_all_of_them(tmp_path: Path) -> None:
    assert run_ranks(2, _loses_a_directory, tmp_path) == ["[1]", "[1]"]


def test_torchs_own_save_takes_the_writer(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    dcp.save(
        {"w": value[:, 1:3], "o": {"a": 1}},
        storage_writer=FileSystemWriterAsync(tmp_path, thread_count=2),
    )
    loaded = {"w": torch.zeros(3, 2), "o": {"a": 0}}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(loaded["w"], value[:, 1:3]) and loaded["o"] == {"a": 1}
    assert sum(os.path.getsize(path) for path in tmp_path.glob("*.distcp")) < 4096


def test_what_the_writer_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Multi-Storage"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
    with pytest.raises(UnsupportedError, match="one file per item"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    with pytest.raises(UsageError, match="two files"):
        FileSystemWriterAsync(tmp_path, separation_hint="optim")
    assert FileSystemWriterAsync.validate_checkpoint_id(tmp_path)
    assert not FileSystemWriterAsync.validate_checkpoint_id("s3://bucket")
    assert FileSystemWriterAsync(tmp_path).checkpoint_id == str(tmp_path)
