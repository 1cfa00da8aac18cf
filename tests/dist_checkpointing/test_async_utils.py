"""Requests, callers and the queue of asynchronous calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    TemporalAsyncCaller,
)
from core.errors import CapacityError, CheckpointingException, UsageError, WorkerError
from tests.dist_checkpointing.ranks import run_ranks


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _write_when(go: Path, path: Path, text: str) -> None:
    _wait_for(go)
    _append(path, text)


def _fail(error: BaseException) -> None:
    raise error


def _die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def _write_tensor(path: Path, tensor: torch.Tensor) -> None:
    path.write_bytes(bytes(tensor.view(torch.uint8).tolist()))


def test_a_request_takes_finalize_functions_until_it_is_frozen():
    request = AsyncRequest(None, (), [])
    request.add_finalize_fn(print)
    frozen = request.freeze()
    assert frozen.is_frozen and not request.is_frozen and frozen.finalize_fns == [print]
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)


def test_a_request_executed_at_once_writes_then_finalizes_in_order(tmp_path):
    log = tmp_path / "log"
    request = AsyncRequest(_append, (log, "w"), [partial(_append, log, "1")], {})
    request.add_finalize_fn(partial(_append, log, "2"))
    request.execute_sync()
    assert log.read_text() == "w12"


def test_what_preload_returns_is_the_second_argument(tmp_path):
    for name, go in (("a", AsyncRequest.execute_sync), ("b", _in_queue)):
        go(AsyncRequest(_append, (tmp_path / name, "never"), [], preload_fn=lambda: "loaded"))
        assert (tmp_path / name).read_text() == "loaded"
    with pytest.raises(ValueError, match="second of async_fn_args"):
        AsyncRequest(_append, (), [], preload_fn=lambda: "x").execute_sync()
    with pytest.raises(ValueError, match="second of async_fn_args"):
        AsyncCallsQueue().schedule_async_request(
            AsyncRequest(_append, (), [], preload_fn=lambda: "x")
        )


def _in_queue(request: AsyncRequest) -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.close()


def _finalize_next(queue: AsyncCallsQueue, blocking: bool) -> None:
    while not queue.maybe_finalize_async_calls(blocking):
        time.sleep(0.01)


def test_calls_are_finalized_in_the_order_in_which_they_were_scheduled(tmp_path):
    go, log = tmp_path / "go", tmp_path / "log"
    queue = AsyncCallsQueue()
    first = AsyncRequest(_write_when, (go, tmp_path / "a", "a"), [partial(_append, log, "0")])
    assert queue.schedule_async_request(first) == 0
    assert queue.schedule_async_request(AsyncRequest(None, (), [partial(_append, log, "1")])) == 1
    assert (
        queue.schedule_async_request(
            AsyncRequest(_append, (tmp_path / "b", "b"), [partial(_append, log, "2")])
        )
        == 2
    )
    _wait_for(tmp_path / "b")
    assert queue.maybe_finalize_async_calls() == [] and queue.get_num_unfinalized_calls() == 3
    assert not log.exists()
    go.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert (log.read_text(), queue.get_num_unfinalized_calls()) == ("012", 0)


def test_tensors_changed_after_scheduling_are_written_as_they_were(tmp_path):
    go = tmp_path / "go"
    tensor = torch.arange(4, dtype=torch.uint8)

    def write(tensor: torch.Tensor) -> None:
        _wait_for(go)
        _write_tensor(tmp_path / "out", tensor)

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(write, (tensor,), []))
    tensor.fill_(9)
    go.touch()
    queue.close()
    assert (tmp_path / "out").read_bytes() == bytes(range(4))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (
            partial(_fail, ValueError("no such luck")),
            WorkerError,
            "ValueError: no such luck.*rank 0",
        ),
        (
            partial(_fail, CapacityError("disk full", file="a")),
            CapacityError,
            "disk full.*file a.*rank 0",
        ),
        (partial(_fail, SystemExit(3)), WorkerError, "SystemExit: 3"),
        (_die, WorkerError, "killed by SIGKILL.*rank 0"),
        (partial(_die, signal.SIGUSR1), WorkerError, "killed by SIGUSR1"),
        (partial(os._exit, 7), WorkerError, "exit code 7"),
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_writer_that_fails_or_dies_is_reported_and_not_finalized(
    tmp_path, work, kind, text, blocking
):
    queue = AsyncCallsQueue()
    finalized = tmp_path / "finalized"
    queue.schedule_async_request(AsyncRequest(work, (), [finalized.touch]))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises(kind, match=text):
        _finalize_next(queue, blocking)
    assert not finalized.exists()
    assert queue.maybe_finalize_async_calls() == [1]
    queue.close()


def test_a_preload_that_fails_is_a_failure_of_the_call(tmp_path):
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        AsyncRequest(_append, (1, 2), [], preload_fn=partial(_fail, MemoryError("too much")))
    )
    with pytest.raises(WorkerError, match="MemoryError: too much"):
        queue.close()


def test_interrupting_the_job_does_not_end_the_writers(tmp_path):
    def work() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        _append(tmp_path / "out", "written")

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(work, (), []))
    queue.close()
    assert (tmp_path / "out").read_text() == "written"


class _Step:
    def __init__(self, log: list[str], name: str, error: BaseException | None = None) -> None:
        self.log, self.name, self.error = log, name, error

    def __call__(self) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(self.name)

    def abandon(self) -> None:
        self.log.append(f"no {self.name}")


def test_what_a_failed_save_leaves_undone_is_abandoned():
    log: list[str] = []
    queue = AsyncCallsQueue()
    steps: list[Callable[[], None]] = [
        _Step(log, "a"),
        _Step(log, "b", CapacityError("full")),
        _Step(log, "c"),
    ]
    queue.schedule_async_request(AsyncRequest(None, (), steps))
    with pytest.raises(CapacityError):
        queue.close()
    assert log == ["a", "no b", "no c"]
    log.clear()
    queue.schedule_async_request(AsyncRequest(_die, (), [_Step(log, "a")]))
    with pytest.raises(WorkerError):
        queue.close()
    queue.schedule_async_request(AsyncRequest(time.sleep, (60,), [_Step(log, "z")]))
    queue.close(abort=True)
    assert log == ["no a", "no z"] and queue.get_num_unfinalized_calls() == 0


def test_closing_finalizes_the_calls_after_a_failed_one(tmp_path):
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(_die, (), []))
    queue.schedule_async_request(AsyncRequest(None, (), [(tmp_path / "second").touch]))
    with pytest.raises(WorkerError, match="SIGKILL"):
        queue.close()
    assert (tmp_path / "second").exists()


def test_a_caller_executes_without_a_queue(tmp_path):
    caller = TemporalAsyncCaller()
    assert caller.is_current_async_call_done(False, False)
    caller.schedule_async_call(AsyncRequest(_append, (tmp_path / "a", "a"), []))
    assert caller.is_current_async_call_done(blocking=True)
    assert caller.process is None and (tmp_path / "a").read_text() == "a"


def _queue_on_ranks(rank: int, world: int, folder: Path) -> object:
    queue = AsyncCallsQueue()
    go = folder / "go"
    work = partial(_write_when, go) if rank == world - 1 else _append
    queue.schedule_async_request(
        AsyncRequest(work, (folder / f"{rank}", "x"), [(folder / f"done{rank}").touch])
    )
    _wait_for(folder / "0") if rank == 0 and world > 1 else None
    early = [queue.maybe_finalize_async_calls() for _ in range(3)]
    if rank == 0:
        go.touch()
    late = queue.maybe_finalize_async_calls(blocking=True)
    return early, late, queue.maybe_finalize_async_calls(no_dist=True)


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_call_is_finalized_when_all_ranks_have_written(tmp_path, world):
    assert run_ranks(world, _queue_on_ranks, tmp_path) == [([[], [], []], [0], [])] * world
    assert sorted(path.name for path in tmp_path.glob("done*")) == [
        f"done{rank}" for rank in range(world)
    ]


def _failing_rank(rank: int, world: int, folder: Path, no_dist: bool, is_killed: bool) -> object:
    queue = AsyncCallsQueue()
    work = (
        (_die if is_killed else partial(_fail, ValueError("odd"))) if rank == 1 else (lambda: None)
    )
    queue.schedule_async_request(AsyncRequest(work, (), [(folder / f"finalized{rank}").touch]))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    try:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
    except CheckpointingException as err:
        return str(err), queue.maybe_finalize_async_calls(blocking=True)
    return None


@pytest.mark.dist
@pytest.mark.parametrize(
    ("no_dist", "is_killed", "text"), [(False, True, "SIGKILL"), (True, False, "ValueError: odd")]
)
def test_the_failure_of_a_rank_s_writer_is_raised_on_every_rank(tmp_path, no_dist, is_killed, text):
    for message, rest in run_ranks(3, _failing_rank, tmp_path, no_dist, is_killed):
        assert text in message and "rank 1" in message and rest == [1]
    assert not list(tmp_path.glob("finalized*"))


def _failing_finalize(rank: int, world: int, folder: Path) -> str:
    queue = AsyncCallsQueue()
    steps: list[Callable[[], None]] = (
        [partial(_fail, OSError("full"))] if rank == 0 else [lambda: None]
    )
    queue.schedule_async_request(AsyncRequest(None, (), [*steps, (folder / f"after{rank}").touch]))
    queue.schedule_async_request(AsyncRequest(None, (), [(folder / f"next{rank}").touch]))
    with pytest.raises(OSError if rank == 0 else CheckpointingException) as info:
        queue.close()
    return str(info.value)


@pytest.mark.dist
def test_a_finalize_function_that_fails_on_one_rank_ends_the_call_on_all(tmp_path):
    own, other = run_ranks(2, _failing_finalize, tmp_path)
    assert own == "full" and "rank 0 failed: OSError: full" in other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next0", "next1"]


def _different_calls(rank: int, world: int) -> str:
    queue = AsyncCallsQueue()
    for _ in range(rank + 1):
        queue.schedule_async_request(AsyncRequest(None, (), []))
    if rank == 1:
        queue.async_calls.popleft()
    with pytest.raises(UsageError) as info:
        queue.maybe_finalize_async_calls()
    return str(info.value)


@pytest.mark.dist
def test_ranks_that_finalize_different_calls_are_told_so():
    assert all("by rank: 0, 1" in text for text in run_ranks(2, _different_calls))


def _more_functions_on_some_ranks(rank: int, world: int, folder: Path) -> list[int]:
    queue, log, called = AsyncCallsQueue(), folder / f"log{rank}", []
    for _ in range(2):
        request = AsyncRequest(_append, (log, "w"), [lambda: called.append(0)])
        # Megatron-LM's first rank writes the tracker file; its last one reports to two services.
        for number in range({0: 1, world - 1: 2}.get(rank, 0)):
            request.add_finalize_fn(partial(called.append, number + 1))
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    return called


@pytest.mark.dist
def test_ranks_may_have_different_numbers_of_finalize_functions(tmp_path):
    results = run_ranks(3, _more_functions_on_some_ranks, tmp_path)
    assert results == [[0, 1, 0, 1], [0, 0], [0, 1, 2, 0, 1, 2]]


def _failed_local_checkpoint(rank: int, world: int, has_replica: bool) -> object:
    called = []

    def look_for_files() -> None:
        called.append("manager")
        if not has_replica:
            raise KeyError("incomplete")

    look_for_files.__module__ = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers"
    queue = AsyncCallsQueue()
    writer = partial(_fail, OSError("full")) if rank == 1 else partial(str)
    request = AsyncRequest(writer, (), [look_for_files, lambda: called.append("visible")])
    queue.schedule_async_request(request)
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except KeyError:
        called.append("raised")
    return called, queue.get_num_unfinalized_calls()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("has_replica", "called"), [(True, ["manager", "visible"]), (False, ["manager", "raised"])]
)
def test_the_manager_of_local_checkpoints_judges_a_failed_save(has_replica, called):
    assert run_ranks(2, _failed_local_checkpoint, has_replica) == [(called, 0)] * 2
