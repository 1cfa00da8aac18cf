"""Ranks agree on values and on failures."""

from __future__ import annotations

import pytest

from core.dist_checkpointing._ranks import comm
from core.errors import CheckpointingException, CorruptError
from tests.dist_checkpointing.ranks import run_ranks


def test_one_process_needs_no_process_group():
    assert (comm.rank(), comm.world_size()) == (0, 1)
    assert comm.all_gather("a") == comm.gather("a") == ["a"]
    assert comm.broadcast(3) == comm.together(lambda: 3) == 3
    assert comm.collect(lambda: 3) == [3]
    comm.barrier()


def _exchange(rank: int, world: int) -> object:
    return (
        comm.all_gather(rank),
        comm.gather(rank * 2, dst=1),
        comm.broadcast(rank, src=1),
        comm.together(lambda: rank),
    )


@pytest.mark.dist
def test_values_are_exchanged_by_rank():
    assert run_ranks(3, _exchange) == [
        ([0, 1, 2], None, 1, 0),
        ([0, 1, 2], [0, 2, 4], 1, 1),
        ([0, 1, 2], None, 1, 2),
    ]


def _failing(rank: int, world: int) -> str:
    def work() -> None:
        if rank == 1:
            raise CorruptError("this shard is bad", key="w")

    try:
        comm.together(work)
    except CorruptError as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


@pytest.mark.dist
def test_a_failure_of_one_rank_is_raised_on_every_rank():
    other, own, third = run_ranks(3, _failing)
    assert own == "CorruptError: this shard is bad (tensor w)"
    assert other == third == "CorruptError: rank 1 failed: this shard is bad (tensor w, rank 1)"


def _collecting(rank: int, world: int) -> object:
    try:
        comm.collect(lambda: (lambda: 0) if rank == 1 else rank)
    except Exception as err:
        return comm.collect(lambda: rank * 2), type(err).__name__
    return "nothing"


@pytest.mark.dist
def test_results_are_collected_and_one_that_cannot_be_pickled_fails_on_every_rank():
    results = run_ranks(3, _collecting)
    assert [values for values, _ in results] == [[0, 2, 4]] * 3
    assert (results[0][1], results[2][1]) == ("WorkerError", "WorkerError") and results[1][
        1
    ] != "WorkerError"


def _failing_before_the_others_meet(rank: int, world: int) -> list[str]:
    def inner() -> object:
        if rank == 1:
            raise CorruptError("this shard is bad")
        return comm.collect(lambda: rank)

    outcomes = []
    for work in (inner, lambda: comm.together(inner)):
        try:
            comm.together(work)
        except CheckpointingException as err:
            outcomes.append(str(err))
        outcomes.append(str(comm.all_gather(rank)))
    return outcomes


@pytest.mark.dist
def test_ranks_that_wait_inside_of_work_that_another_failed_at_end_and_stay_in_step():
    results = run_ranks(3, _failing_before_the_others_meet)
    assert all(
        "this shard is bad" in of_rank[0] and "this shard is bad" in of_rank[2]
        for of_rank in results
    )
    assert all(of_rank[1] == of_rank[3] == "[0, 1, 2]" for of_rank in results)


def _at_different_steps(rank: int, world: int) -> tuple[str, list[int]]:
    try:
        comm.together(lambda: comm.all_gather(rank) if rank else comm.collect(lambda: rank))
    except CheckpointingException as err:
        return str(err), comm.all_gather(rank)
    return "nothing", []


@pytest.mark.dist
def test_ranks_at_different_steps_notice_it_and_take_no_answer_for_another():
    for text, after in run_ranks(3, _at_different_steps):
        assert (
            "different steps (rank 0: exchange of results at level 1; rank 1: exchange of values"
            in text
        )
        assert after == [0, 1, 2]
