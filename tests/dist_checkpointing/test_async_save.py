"""Asynchronous saves: the same files as synchronous ones, and nothing visible of those that did not
end well.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.serialization import load, save
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from core.errors import CheckpointingException
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.test_torch_strategy import differences, saves, state_of
from tests.support.staging import free_bytes

COMMON = {"iteration": 7, "args": {"lr": 0.1}}


def _state(rank: int, world: int, *, plus: int = 0) -> dict[str, Any]:
    state = {**state_of(rank, world), **COMMON}
    for tensor in _tensors(state):
        tensor.view(torch.uint8).add_(plus) if tensor.dim() else tensor.add_(plus)
    return state


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf.data for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _gated(
    go: Path, before: Callable[[], None] | None, write: Callable[..., None], *args: Any
) -> None:
    while not go.exists():
        time.sleep(0.005)
    if before is not None:
        before()
    write(*args)


def _die_half_way(write: Callable[..., None], *args: Any) -> None:
    write(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def _begin(state: dict[str, Any], folder: Path, go: Path, **options: Any) -> AsyncRequest:
    """A request that writes when ``go`` is there."""
    folder.mkdir(exist_ok=True)
    request = save(state, folder, async_sharded_save=True, **options)
    assert request is not None and request.async_fn is not None
    return request._replace(async_fn=partial(_gated, go, None, request.async_fn))


def _loads(folder: Path, *, plus: int = 0) -> bool:
    """Whether a checkpoint is there and whole, loaded in one process."""
    template, wanted = state_of(0, 1, is_filled=False), _state(0, 1, plus=plus)
    for state in (template, wanted):
        state.pop("rng", None)  # there is one for every rank that has saved
    loaded = load(template, folder)
    return (
        not differences(loaded, {key: wanted[key] for key in template})
        and loaded.items() >= COMMON.items()
    )


def _saved_twice(
    rank: int, world: int, folder: Path, persistent: bool, is_shared_out: bool
) -> list[list[int]]:
    def strategy() -> Any:
        return FullyParallelSaveStrategyWrapper(saves()) if is_shared_out else saves()

    (folder / "sync").mkdir(exist_ok=True)
    save(_state(rank, world), folder / "sync", strategy())
    queue = AsyncCallsQueue(persistent)
    state, go = _state(rank, world), folder / "go"
    queue.schedule_async_request(_begin(state, folder / "async", go, sharded_strategy=strategy()))
    for tensor in _tensors(state):
        tensor.zero_()
    early = queue.maybe_finalize_async_calls()
    assert sorted(os.listdir(folder / "async")) == [".ckpt-stage"]
    torch.distributed.barrier()
    go.touch()
    late = queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return [early, late]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "persistent", "is_shared_out"),
    [
        (1, False, False),
        (2, False, True),
        pytest.param(4, False, False, marks=pytest.mark.long),
        # A process that is kept imports torch, on each rank.
        (1, True, False),
        pytest.param(2, True, True, marks=pytest.mark.long),
    ],
)
def test_an_asynchronous_save_makes_the_files_of_a_synchronous_one(
    tmp_path, world, persistent, is_shared_out
):
    assert (
        run_ranks(world, _saved_twice, tmp_path, persistent, is_shared_out) == [[[], [0]]] * world
    )
    files = _files(tmp_path / "async")
    assert files == _files(tmp_path / "sync")
    assert {"metadata.json", "common.pt", ".metadata", "__0_0.distcp"} <= files.keys()


def _several(rank: int, world: int, folder: Path) -> list[Any]:
    queue = AsyncCallsQueue()
    state = _state(rank, world)
    for number in range(3):
        queue.schedule_async_request(_begin(state, folder / f"{number}", folder / f"go{number}"))
        for tensor in _tensors(state):
            tensor.view(torch.uint8).add_(1) if tensor.dim() else tensor.add_(1)
    finalized = []
    for number in (2, 1, 0):
        (folder / f"go{number}").touch()
        if number:
            time.sleep(0.2)
            finalized.append(queue.maybe_finalize_async_calls())
    finalized.append(queue.maybe_finalize_async_calls(blocking=True))
    return [*finalized, free_bytes(POOL) > 0]


def _cannot_write(rank: int, world: int, folder: Path, is_async: bool) -> tuple[str, list[int]]:
    """Save to a directory where the writer of rank 1 finds a directory in place of its file."""
    if rank == 1:
        (folder / "__1_1.distcp").mkdir()
    torch.distributed.barrier()
    tensors = {n: ShardedTensor.from_rank_offsets(f"w{n}.{rank}", torch.ones(9)) for n in range(4)}
    end = partial(saves().save, tensors, folder)
    if is_async:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(saves().async_save(tensors, folder))
        end = partial(queue.maybe_finalize_async_calls, blocking=True)
    with pytest.raises(CheckpointException) as caught:
        end()
    return str(caught.value), list(caught.value.failures)


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
def test_the_error_of_one_writer_reaches_every_rank_as_torchs_exception(tmp_path, is_async):
    for text, ranks in run_ranks(3, _cannot_write, tmp_path, is_async):
        assert "__1_1.distcp" in text and ranks == [1]
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.dist
@pytest.mark.first(1)
@pytest.mark.parametrize("world", [2, 1])
def test_several_saves_in_flight_keep_their_own_values_and_end_in_order(tmp_path, world):
    assert run_ranks(world, _several, tmp_path) == [[[], [], [0, 1, 2], True]] * world
    assert [_loads(tmp_path / f"{number}", plus=number) for number in range(3)] == [True] * 3
    times = [(tmp_path / f"{number}").stat().st_mtime_ns for number in range(3)]
    assert times == sorted(times)


def _killed_writer(rank: int, world: int, folder: Path, persistent: bool, overwrite: bool) -> Any:
    queue = AsyncCallsQueue(persistent)
    old, new = folder / "old", folder / ("old" if overwrite else "new")
    queue.schedule_async_request(_begin(_state(rank, world), old, folder))
    queue.maybe_finalize_async_calls(blocking=True)
    request = _begin(_state(rank, world, plus=1), new, folder, overwrite=overwrite)
    if rank == world - 1:
        request = request._replace(async_fn=partial(_die_half_way, request.async_fn))
    queue.schedule_async_request(request)
    try:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=overwrite)
    except CheckpointingException as err:
        queue.close()
        return str(err)
    return "no error"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("persistent", "overwrite"),
    [(False, False), (False, True), pytest.param(True, True, marks=pytest.mark.long)],
)
def test_a_killed_writer_leaves_the_checkpoint_before_it_and_nothing_else(
    tmp_path, persistent, overwrite
):
    for text in run_ranks(2, _killed_writer, tmp_path, persistent, overwrite):
        assert "SIGKILL" in text and "rank 1" in text
    assert _loads(tmp_path / "old") and ".ckpt-stage" not in os.listdir(tmp_path / "old")
    assert overwrite or os.listdir(tmp_path / "new") == []


def _killed_ranks(rank: int, world: int, folder: Path, n_killed: int) -> str:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_begin(_state(rank, world), folder / "old", folder))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.schedule_async_request(_begin(_state(rank, world, plus=1), folder / "new", folder / "go"))
    (folder / f"pid{rank}").write_text(str(queue.async_calls[0].async_caller.process.pid))
    torch.distributed.barrier()
    if rank >= world - n_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "go").touch()
    queue.maybe_finalize_async_calls(blocking=True)
    return "finalized"


def _save_again(rank: int, world: int, folder: Path) -> list[str]:
    save(_state(rank, world, plus=2), folder / "new")
    return os.listdir(folder / "new")


@pytest.mark.dist
@pytest.mark.first(1)
@pytest.mark.parametrize("n_killed", [1, 2])
def test_a_job_that_is_killed_leaves_the_checkpoint_before_and_can_save_again(tmp_path, n_killed):
    with pytest.raises(AssertionError, match="died or hung"):
        run_ranks(2, _killed_ranks, tmp_path, n_killed)
    assert _loads(tmp_path / "old")
    assert (
        not (tmp_path / "new" / "metadata.json").exists()
        and not (tmp_path / "new" / ".metadata").exists()
    )
    with pytest.raises(CheckpointingException):
        load(state_of(0, 1, is_filled=False), tmp_path / "new")
    for path in tmp_path.glob("pid*"):
        assert not Path("/proc", path.read_text(), "exe").exists() or n_killed == 1
    names = run_ranks(2, _save_again, tmp_path)[0]
    assert _loads(tmp_path / "new", plus=2) and ".ckpt-stage" not in names


def test_without_torch_distributed_a_save_may_be_asynchronous_too(tmp_path):
    queue = AsyncCallsQueue()
    go = tmp_path / "go"
    queue.schedule_async_request(_begin(_state(0, 1), tmp_path / "a", go))
    assert queue.maybe_finalize_async_calls(no_dist=True) == []
    go.touch()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    assert _loads(tmp_path / "a")


def test_a_request_can_be_executed_at_once(tmp_path):
    (tmp_path / "a").mkdir()
    request = save(_state(0, 1), tmp_path / "a", async_sharded_save=True)
    assert request is not None
    request.execute_sync()
    assert _loads(tmp_path / "a")


def test_the_request_of_a_scheduled_save_keeps_no_tensor_of_the_training_alive(tmp_path):
    queue = AsyncCallsQueue()
    state = _state(0, 1)
    alive = [weakref.ref(tensor) for tensor in _tensors(state)]
    queue.schedule_async_request(_begin(state, tmp_path / "a", tmp_path / "go"))
    del state
    assert not any(reference() is not None for reference in alive)
    (tmp_path / "go").touch()
    queue.close()
    assert _loads(tmp_path / "a")
