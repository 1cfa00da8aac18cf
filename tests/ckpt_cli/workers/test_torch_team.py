"""What workers tell each other through torch.distributed, and how they hear that one is gone."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from ckpt_cli.workers.store import GoneError
from core.engine.team.protocol import broadcast_result, failed_rank_of, gather_results
from core.errors import CorruptError, StorageError, WorkerError
from tests.ckpt_cli.workers.torch_teams import run_torch_team

pytestmark = pytest.mark.dist


def _value(rank: int, n_bytes: int) -> bytes:
    return bytes((rank * 7 + i) % 251 for i in range(n_bytes))


def _meet(team: Any, sizes: list[int]) -> Any:
    results = []
    for size in sizes:
        gathered = team.gather(_value(team.rank, size * team.rank))
        shared = team.broadcast(_value(9, size) if team.rank == 0 else b"")
        results.append((gathered, shared))
    team.expect(10)
    team.advance(4)
    team.gather(b"")
    time.sleep(2 * team._watch.interval_s)
    return results, team.progress(), team.facts(), list(team.hosts)


def test_data_of_any_size_are_gathered_and_shared(monkeypatch: pytest.MonkeyPatch):
    sizes = [0, 1, 4097, 50_000]
    lead, *rest = run_torch_team(3, _meet, sizes)
    assert lead[0] == [
        ([_value(rank, size * rank) for rank in range(3)], _value(9, size)) for size in sizes
    ]
    assert rest[0][0] == rest[1][0] == [(None, _value(9, size)) for size in sizes]
    assert [len(hosts) for *_, hosts in (lead, *rest)] == [3, 3, 3]
    assert lead[1] == [(4, 10)] * 3
    assert lead[2]["collective_bytes"] == sum(2 * 2 * size + 2 * size for size in sizes)
    assert lead[2]["store_bytes"] > 0
    assert lead[2]["n_meetings"] == 2 * len(sizes) + 2, "one more when all have connected"


def _in_parts(team: Any) -> Any:
    from ckpt_cli.workers import torch_team

    torch_team._PART_BYTES = 3 * 4096
    return team.gather(_value(team.rank, 10_000 if team.rank == 1 else 5000)), team.collective_bytes


def test_long_answers_come_in_parts():
    lead, *_ = run_torch_team(3, _in_parts)
    assert lead == ([_value(0, 5000), _value(1, 10_000), _value(2, 5000)], 2 * 10_000)


def _fail(team: Any, guilty: int) -> Any:
    def work() -> None:
        if team.rank == guilty:
            raise CorruptError("bytes are wrong", file="f")
        while True:
            team.advance(1)
            time.sleep(0.01)

    return gather_results(team, work)


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_stops_the_others_and_is_raised_by_all(guilty: int):
    for error in run_torch_team(2, _fail, guilty):
        assert isinstance(error, CorruptError)
        assert (error.file, failed_rank_of(error)) == ("f", guilty)


def _leave(team: Any, guilty: int) -> Any:
    """One fails before the meeting, and others wait there."""
    if team.rank == guilty:
        team.leave(StorageError("the disk is gone"))
        return None
    return gather_results(team, lambda: 1)


@pytest.mark.parametrize("guilty", [0, 2])
def test_who_waits_raises_the_error_of_a_worker_that_left(guilty: int):
    errors = run_torch_team(3, _leave, guilty)
    assert errors.pop(guilty) is None
    for error in errors:
        assert isinstance(error, StorageError)
        assert (error.message, failed_rank_of(error)) == ("the disk is gone", guilty)


def _die(team: Any, guilty: int) -> Any:
    broadcast_result(team, lambda: None)
    if team.rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    return gather_results(team, lambda: 1)


def test_a_worker_that_was_killed_is_named_after_the_time_limit():
    lead, killed, other = run_torch_team(3, _die, 1, timeout_s=1.5)
    assert killed is None
    for error in (lead, other):
        assert isinstance(error, GoneError)
        assert error.message.startswith("rank 1 on ") and "no heartbeat for 1.5 s" in error.message


def test_a_lead_that_was_killed_with_its_store_is_named():
    killed, *rest = run_torch_team(3, _die, 0)
    assert killed is None
    for error in rest:
        assert isinstance(error, GoneError) and error.is_of_lead
        assert "rank 0 on " in error.message


def _die_while_others_work(team: Any) -> Any:
    broadcast_result(team, lambda: None)

    def work() -> None:
        if team.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            team.advance(1)
            time.sleep(0.01)

    return gather_results(team, work)


def test_work_does_not_go_on_without_the_store():
    _, other = run_torch_team(2, _die_while_others_work)
    assert isinstance(other, GoneError) and "rank 0 on " in other.message


def _die_inside(team: Any) -> Any:
    """One comes to a meeting, and is killed while the data are on their way."""
    broadcast_result(team, lambda: None)
    if team.rank == 1:
        team._give = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        return gather_results(team, lambda: 1)
    except GoneError as err:
        team.leave(err)
        raise


def test_a_worker_that_was_killed_inside_a_collective_is_named_by_its_beats():
    lead, killed, other = run_torch_team(3, _die_inside)
    assert killed is None
    for error in (lead, other):
        assert isinstance(error, GoneError) and not error.is_of_lead
        assert (
            error.message.startswith("lost contact with rank 1 on ")
            and "the connection broke" in error.message
        )


def _freeze(team: Any) -> Any:
    """A lead that stands still, as where its host has vanished: its store answers no more."""
    pid = broadcast_result(team, os.getpid)
    if team.rank == 0:
        os.kill(pid, signal.SIGSTOP)
    try:
        return gather_results(team, lambda: 1)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_lead_that_answers_no_more_is_given_up():
    error = run_torch_team(2, _freeze, timeout_s=1.5)[1]
    assert isinstance(error, GoneError) and error.is_of_lead
    assert "has not answered for 1.5 s" in error.message


def _end_early(team: Any) -> Any:
    if team.rank == 1:
        return None
    return team.gather(b"")


def test_a_worker_that_ends_while_others_wait_for_it_is_a_bug_that_is_told():
    error, _ = run_torch_team(2, _end_early)
    assert isinstance(error, WorkerError) and not isinstance(error, GoneError)
    assert "has exited, but rank 0 is still waiting for it" in error.message


def _interrupted(team: Any) -> Any:
    """A signal is heard in the middle of a wait."""
    if team.rank == 1:
        time.sleep(1.0)
        return team.broadcast(b"")
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        team.gather(b"")
    except KeyboardInterrupt:
        team.leave(WorkerError("interrupted"))
        return "heard"
    return "not heard"


def test_signals_are_heard_while_a_worker_waits():
    first, second = run_torch_team(2, _interrupted)
    assert first == "heard"
    assert isinstance(second, WorkerError) and second.message == "interrupted"
