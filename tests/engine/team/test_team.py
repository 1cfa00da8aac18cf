"""What a team's ranks tell each other, and what becomes of errors."""

from __future__ import annotations

import os
import signal
import time

import pytest

from core.engine.team.protocol import (
    ALONE,
    Figures,
    Team,
    broadcast_result,
    failed_rank_of,
    gather_results,
    is_final,
    summarize_figures,
)
from core.errors import CorruptError, WorkerError
from tests.support.teams import run_team


def _meet(team: Team) -> object:
    plan = broadcast_result(team, lambda: {"from": team.rank})
    return plan, gather_results(team, lambda: team.rank * 10)


def test_ranks_are_told_and_collected():
    assert run_team(3, _meet) == [
        ({"from": 0}, [0, 10, 20]),
        ({"from": 0}, None),
        ({"from": 0}, None),
    ]


def _fail(team: Team, guilty: int) -> object:
    def work() -> None:
        if team.rank == guilty:
            raise CorruptError("bytes are wrong", file="f", key="w")
        while True:
            team.advance(1)
            time.sleep(0.01)

    gather_results(team, work)
    return None


@pytest.mark.parametrize("guilty", [0, 2])
def test_all_ranks_raise_what_one_raised(guilty: int):
    for error in run_team(3, _fail, guilty, allow_failure=True):
        assert isinstance(error, CorruptError)
        assert (error.message, error.file, error.key, failed_rank_of(error)) == (
            "bytes are wrong",
            "f",
            "w",
            guilty,
        )
        assert is_final(error)


def _lead_fails(team: Team) -> object:
    def work() -> object:
        raise ValueError("a bug")

    return broadcast_result(team, work)


def test_all_ranks_hear_that_the_lead_failed():
    errors = run_team(2, _lead_fails, allow_failure=True)
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "a bug")] * 2
    assert not is_final(errors[0])


def _die(team: Team) -> object:
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return gather_results(team, lambda: 1)


def test_a_rank_that_dies_is_an_error_of_the_others():
    first, second = run_team(2, _die, allow_failure=True)
    assert isinstance(first, WorkerError) and not is_final(first)
    assert second is None


def test_alone_everything_is_a_plain_call():
    assert gather_results(ALONE, lambda: 3) == [3]
    assert broadcast_result(ALONE, lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        gather_results(ALONE, lambda: 1 // 0)


def test_figures():
    summary = summarize_figures([Figures(0, "a", 100, 100, 1.0), Figures(1, "b", 50, 50, 2.0)])
    assert (summary["n_workers"], summary["n_hosts"], summary["balance"]) == (2, 2, 1.3333)
