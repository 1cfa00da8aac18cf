"""Who is alive, as beats tell."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_cli.workers import team_watch
from ckpt_cli.workers.store import ScopedStore
from ckpt_cli.workers.team_watch import TeamWatch
from core.errors import CorruptError


class Table:
    """A store that is a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, name: str, value: str | bytes) -> None:
        self.entries[name] = value.encode() if isinstance(value, str) else value

    def get(self, name: str) -> bytes:
        return self.entries[name]

    def multi_get(self, names: list[str]) -> list[bytes]:
        return [self.entries[name] for name in names]

    def check(self, names: list[str]) -> bool:
        return all(name in self.entries for name in names)

    def add(self, name: str, number: int) -> int:
        self.entries[name] = str(int(self.entries.get(name, b"0")) + number).encode()
        return int(self.entries[name])


class Team:
    """Three workers with one clock, which beat when they are told to."""

    def __init__(self, clock: list[float]) -> None:
        self.store = ScopedStore(Table(), "x")
        self.clock = clock
        self.watches = [TeamWatch(rank, ["a", "b", "b"], timeout_s=10) for rank in range(3)]
        self.watches[0].begin(self.store)

    def beat(self, *ranks: int, seconds: float = 1.0) -> None:
        self.clock[0] += seconds
        for rank in (*ranks, *ranks):  # twice, so that the first to beat sees the last
            self.watches[rank].beat(self.store)

    def error(self, rank: int) -> Any:
        return self.watches[rank].error


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    clock = [100.0]
    monkeypatch.setattr(team_watch, "monotonic", lambda: clock[0])
    return Team(clock)


def test_the_lead_knows_how_far_all_are(team: Team):
    for rank, watch in enumerate(team.watches):
        watch.expect(10 * rank)
        watch.advance(rank)
    team.beat(0, 1, 2)
    assert team.watches[0].progress() == [(0, 0), (1, 10), (2, 20)]
    assert team.watches[0].store_bytes() > 0
    assert team.watches[0].living() == [1, 2]


def test_a_silent_worker_is_told_by_the_lead_to_all(team: Team):
    team.beat(0, 1, 2)
    for _ in range(13):
        team.beat(0, 1)
    assert "rank 2 on b has sent no heartbeat for 10 s" in str(team.error(0))
    assert str(team.error(1)) == str(team.error(0))
    assert team.watches[1].is_alarmed
    assert not team.error(0).is_of_lead


def test_a_silent_lead_is_seen_by_each(team: Team):
    team.beat(0, 1, 2)
    for _ in range(13):
        team.beat(1, 2)
    for rank in (1, 2):
        assert "rank 0 on a has sent no heartbeat for 10 s" in str(team.error(rank))
        assert team.error(rank).is_of_lead


def test_time_in_which_nobody_could_look_is_nobodys_silence(team: Team):
    team.beat(0, 1, 2)
    team.beat(0, seconds=300.0)
    team.beat(0, seconds=1.0)
    assert team.error(0) is None
    team.beat(1, 2)
    assert team.error(0) is None and team.error(1) is None


def test_a_worker_that_has_ended_is_not_silent(team: Team):
    team.beat(0, 1, 2)
    team.watches[2].end(team.store)
    for _ in range(15):
        team.beat(0, 1)
    assert team.error(0) is None
    assert team.watches[0].ended() == [2]
    assert team.watches[0].living() == [1]


def test_the_first_that_leaves_is_heard(team: Team):
    team.beat(0, 1, 2)
    team.watches[2].leave(team.store, CorruptError("first"))
    team.watches[1].leave(team.store, CorruptError("second"))
    team.beat(0, 1)
    for rank in (0, 1):
        error = team.error(rank)
        assert isinstance(error, CorruptError)
        assert (error.message, getattr(error, "worker", None)) == ("first", 2)


def test_an_alarm_stops_the_others_but_not_their_meeting(team: Team):
    team.beat(0, 1, 2)
    TeamWatch.alarm(team.store)
    team.beat(0, 1, 2)
    assert all(watch.is_alarmed for watch in team.watches)
    assert [team.error(rank) for rank in range(3)] == [None] * 3
