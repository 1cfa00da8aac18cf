"""How workers find one another at a store."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from ckpt_cli.workers.rendezvous import Meeting, interface_of, meet_workers
from core.errors import CheckpointingException, UsageError, WorkerError
from tests.ckpt_cli.workers.torch_teams import free_port, place


@pytest.fixture
def store() -> Any:
    """A store that an elastic agent would keep."""
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def _meet(port: int, size: int, *, problem: CheckpointingException | None = None) -> dict[int, Any]:
    """What each rank, in a thread, comes to."""
    outcomes: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            where = place(rank, size, port, has_store=True)
            outcomes[rank] = meet_workers(
                where, {}, lambda members: problem, timeout_s=30, join_timeout_s=60
            )
        except CheckpointingException as err:
            outcomes[rank] = err

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_workers_meet_under_a_new_name_each_time(store: Any):
    meetings = [_meet(store.port, 3) for _ in range(2)]
    for outcomes in meetings:
        assert all(isinstance(outcome, Meeting) for outcome in outcomes.values())
        assert len({outcome.prefix for outcome in outcomes.values()}) == 1
        assert outcomes[2].hosts == [socket.gethostname()] * 3
        assert outcomes[1].address == "127.0.0.1"
    assert meetings[0][0].prefix != meetings[1][0].prefix


def test_what_workers_of_an_earlier_start_left_is_passed_over(store: Any):
    store.set("lead", "old")
    store.set("old/join/1", json.dumps({"token": "gone", "host": "x"}))
    store.set(
        "old/welcome", json.dumps({"tokens": ["old", "gone"], "hosts": ["x", "x"], "error": None})
    )
    outcomes = _meet(store.port, 2)
    assert outcomes[1].prefix == outcomes[0].prefix != "old"


def test_all_hear_what_the_lead_finds_wrong(store: Any):
    outcomes = _meet(store.port, 3, problem=UsageError("they differ", hint="do not"))
    assert outcomes.keys() == {0, 1, 2}
    for error in outcomes.values():
        assert isinstance(error, UsageError)
        assert (error.message, error.hint) == ("they differ", "do not")


def test_missing_workers_are_named(store: Any):
    with pytest.raises(WorkerError, match=r"2 of 3 workers did not join .* \(rank 1, 2\)"):
        meet_workers(
            place(0, 3, store.port, has_store=True),
            {},
            lambda _: None,
            timeout_s=30,
            join_timeout_s=1,
        )


def test_a_lead_that_never_comes_is_named(store: Any):
    with pytest.raises(WorkerError, match="rank 0 did not answer rank 1"):
        meet_workers(
            place(1, 3, store.port, has_store=True),
            {},
            lambda _: None,
            timeout_s=30,
            join_timeout_s=1,
        )


def test_nobody_at_the_address_is_an_error():
    with pytest.raises(
        WorkerError, match=r"got no answer from 127\.0\.0\.1:\d+, where the workers meet"
    ):
        meet_workers(place(1, 2, free_port()), {}, lambda _: None, timeout_s=30, join_timeout_s=1)


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} .* is in use by another program"):
            meet_workers(place(0, 2, port), {}, lambda _: None, timeout_s=30, join_timeout_s=5)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
