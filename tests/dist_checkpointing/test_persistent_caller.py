"""The process that is kept between asynchronous saves, and how tensors get there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
)
from core.errors import CapacityError, CheckpointingException, WorkerError
from tests.dist_checkpointing.ranks import run_ranks
from tests.support import forked
from tests.support.staging import free_bytes


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _write_pid(path: Path) -> None:
    _append(path, f"{os.getpid()} ")


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _write_when(go: Path, out: Path, value: object) -> None:
    _wait_for(go)
    torch.save(value, out)


def _fail(error: BaseException) -> None:
    raise error


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    """A queue for tests that leave its process alive, which takes seconds to import torch."""
    calls = AsyncCallsQueue(persistent=True)
    yield calls
    calls.close()


def test_one_process_executes_all_calls_in_order(tmp_path, queue):
    pids, go, log = tmp_path / "pids", tmp_path / "go", tmp_path / "log"
    first = queue.schedule_async_request(
        AsyncRequest(_write_when, (go, tmp_path / "a", 1), [partial(_append, log, "0")])
    )
    queue.schedule_async_request(AsyncRequest(None, (), [partial(_append, log, "1")]))
    queue.schedule_async_request(AsyncRequest(_write_pid, (pids,), [partial(_append, log, "2")]))
    queue.schedule_async_request(AsyncRequest(_write_pid, (pids,), [], preload_fn=None))
    assert queue.maybe_finalize_async_calls() == [] and not log.exists()
    go.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [*range(first, first + 4)]
    assert log.read_text() == "012" and len(set(pids.read_text().split())) == 1
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == []


def test_tensors_arrive_as_they_were_whatever_they_are(tmp_path, queue):
    plain = torch.arange(1000, dtype=torch.float32)
    staged = POOL.copy_tensors([plain * 2, plain.to(torch.bfloat16)])
    value = {
        "plain": plain,
        "again": plain,
        "strided": torch.arange(12).view(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(True),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "staged": staged,
        "other": [1, "a", b"b"],
    }
    expected = {key: ([t.clone() for t in v] if key == "staged" else v) for key, v in value.items()}
    expected |= {key: v.detach().clone() for key, v in value.items() if isinstance(v, torch.Tensor)}
    go, out = tmp_path / "go", tmp_path / "out"
    queue.schedule_async_request(AsyncRequest(_write_when, (go, out, value), []))
    plain.zero_()
    go.touch()
    queue.maybe_finalize_async_calls(blocking=True)
    loaded = torch.load(out)
    assert loaded.keys() == expected.keys() and loaded["other"] == expected["other"]
    for key in expected.keys() - {"staged", "other"}:
        assert loaded[key].dtype == expected[key].dtype and loaded[key].shape == expected[key].shape
        assert torch.equal(loaded[key].resolve_conj(), expected[key].resolve_conj()), key
    assert all(map(torch.equal, loaded["staged"], expected["staged"]))


def test_what_preload_returns_is_sent(tmp_path, queue):
    live = torch.arange(10)
    go = tmp_path / "go"
    request = AsyncRequest(
        _write_when,
        (go, "never"),
        [],
        {"value": None},
        preload_fn=lambda: tmp_path / f"{live.sum()}",
    )
    queue.schedule_async_request(request)
    go.touch()
    queue.maybe_finalize_async_calls(blocking=True)
    assert (tmp_path / "45").exists()


@pytest.mark.long
def test_a_process_killed_between_calls_is_replaced(tmp_path):
    caller = PersistentAsyncCaller()
    for name in "ab":
        caller.schedule_async_call(AsyncRequest(_append, (tmp_path / name, name), []))
        assert caller.is_current_async_call_done(blocking=True) and caller.failure is None
        os.kill(caller.process.pid, signal.SIGKILL)
        caller.process.join()
    caller.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_cannot_be_pickled_is_a_failure_of_its_call(tmp_path, queue):
    queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
    queue.schedule_async_request(AsyncRequest(_append, (tmp_path / "a", "a"), []))
    with pytest.raises(WorkerError, match="lambda"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.maybe_finalize_async_calls(blocking=True)
    assert (tmp_path / "a").exists()


def test_failures_and_deaths_are_reported_and_the_next_call_gets_a_new_process(tmp_path, queue):
    """The last test of the shared queue, which it closes."""
    never = tmp_path / "never"
    for work, args in (
        (_fail, (CapacityError("disk full"),)),
        (_append, (tmp_path / "a", "a")),
        (_die, ()),
    ):
        queue.schedule_async_request(
            AsyncRequest(work, args, [never.touch] if work is not _append else [])
        )
    queue.schedule_async_request(AsyncRequest(_append, (tmp_path / "b", "b"), [never.touch]))
    with pytest.raises(CapacityError, match="disk full.*rank 0"):
        queue.maybe_finalize_async_calls(blocking=True)
    with pytest.raises(WorkerError, match="killed by SIGKILL.*rank 0"):
        queue.maybe_finalize_async_calls(blocking=True)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.schedule_async_request(AsyncRequest(_write_pid, (tmp_path / "c",), []))
    queue.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "c").read_text()), 0)


def test_abort_ends_the_process_at_once(tmp_path):
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(time.sleep, (600,), [(tmp_path / "a").touch]))
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0 and not (tmp_path / "a").exists()


@pytest.mark.long
def test_memory_is_free_again_when_the_call_is_finalized(tmp_path):
    POOL.clear()
    queue = AsyncCallsQueue(persistent=True)
    for name in "ab":
        tensor = torch.ones(1 << 20)
        queue.schedule_async_request(
            AsyncRequest(_write_when, (tmp_path, tmp_path / name, tensor), [])
        )
        queue.maybe_finalize_async_calls(blocking=True)
        free = free_bytes(POOL)
        assert (4 << 20) <= free < (4 << 20) + 10000
    queue.close()
    assert free_bytes(POOL) == 0


_JOB = """
import sys, time
from pathlib import Path
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from tests.dist_checkpointing.test_persistent_caller import _write_pid
if __name__ == "__main__":
    queue = AsyncCallsQueue(persistent=sys.argv[2] == "persistent")
    queue.schedule_async_request(AsyncRequest(_write_pid, (Path(sys.argv[1]),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    if sys.argv[3] == "killed":
        queue.schedule_async_request(AsyncRequest(time.sleep, (600,), []))
        import os, signal
        Path(sys.argv[1]).with_name("child").write_text(str(queue.async_calls[0].async_caller.process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param("persistent", "returns", marks=pytest.mark.long),
        pytest.param("persistent", "killed", marks=pytest.mark.long),
        ("temporal", "killed"),
    ],
)
def test_no_process_outlives_its_rank(tmp_path, kind, end):
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    done = forked.run(
        ["-W", "ignore", script, tmp_path / "pid", kind, end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=120,
    )
    assert done.returncode == (0 if end == "returns" else -signal.SIGKILL)
    pid = int((tmp_path / ("pid" if end == "returns" else "child")).read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _on_ranks(rank: int, world: int, folder: Path) -> object:
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(_append, (folder / f"{rank}", "a"), []))
    queue.schedule_async_request(
        AsyncRequest(_die if rank == 1 else time.sleep, (0,) if rank != 1 else (), [])
    )
    queue.schedule_async_request(AsyncRequest(None, (), [(folder / f"finalized{rank}").touch]))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointingException as err:
        rest = queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return str(err), rest
    return None


@pytest.mark.dist
@pytest.mark.long  # each of three processes imports torch
def test_the_death_of_one_process_is_raised_on_every_rank(tmp_path):
    for text, rest in run_ranks(2, _on_ranks, tmp_path):
        assert "SIGKILL" in text and "rank 1" in text and rest == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0",
        "1",
        "finalized0",
        "finalized1",
    ]
