"""ckpt_cli.launch.failure: the worker that is told about is the one that failed, not those that it
took along.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ckpt_cli.host.results import WorkerResult, read_results, write_result
from ckpt_cli.launch.failure import Cause, Ended, LaunchError, cause_of
from ckpt_cli.screen.failure import failure_of


def make_result(rank: int, exit_code: int, line: str = "", **more: object) -> WorkerResult:
    return WorkerResult(rank, "here", 100 + rank, exit_code, line, **more)  # type: ignore[arg-type]


def cause(
    ended: dict[int, int],
    results: list[WorkerResult],
    first: int | None = None,
    log_path: Path | None = None,
) -> Cause | None:
    processes = [Ended(rank, code, log_path) for rank, code in ended.items()]
    return cause_of(
        processes,
        {result.rank: result for result in results},
        first=None
        if first is None
        else next(process for process in processes if process.rank == first),
        host="here",
    )


SILENT = "rank 1 on here has sent no heartbeat for 60 s"
STOPPED = -signal.SIGTERM


@pytest.mark.parametrize(
    ("ended", "results", "rank", "message"),
    [
        ({0: STOPPED, 1: -9}, [], 1, "its process was killed by SIGKILL"),
        ({0: 8, 1: -9}, [make_result(0, 8, SILENT)], 1, "its process was killed by SIGKILL"),
        ({0: -6, 1: -9}, [], 1, "its process was killed by SIGKILL"),
        ({0: 8, 1: 6}, [make_result(0, 8, SILENT), make_result(1, 6, "no space")], 1, "no space"),
        ({0: -9, 1: 6}, [make_result(1, 6, "no space")], 1, "no space"),
        (
            {0: 143, 1: 70},
            [make_result(0, 143, "interrupted"), make_result(1, 70, "a bug")],
            1,
            "a bug",
        ),
        ({0: 8, 1: 143}, [make_result(0, 8, "x", is_secondary=True), make_result(1, 143)], 0, "x"),
        (
            {0: 8, 2: 8},
            [make_result(0, 8, "x", is_secondary=True), make_result(2, 8, "versions differ")],
            2,
            "versions differ",
        ),
        ({0: STOPPED, 3: 1}, [], 3, "its process ended with exit code 1"),
        ({0: 6}, [make_result(0, 6, "no space", worker=5, worker_host="there")], 5, "no space"),
    ],
)
def test_the_cause_is_the_worker_that_failed_by_itself(
    ended: dict[int, int], results: list[WorkerResult], rank: int, message: str
) -> None:
    failure = cause(ended, results)
    assert failure is not None
    assert (failure.rank, failure.message) == (rank, message)


def test_a_frozen_worker_that_the_agent_had_to_kill_is_not_said_to_lack_memory() -> None:
    failure = cause({0: 8, 1: -9}, [make_result(0, 8, SILENT, is_secondary=True)])
    assert failure is not None and "sent no heartbeat" in (failure.hint or "")
    failure = cause({0: 8, 1: -9}, [make_result(0, 8, "the store is gone", is_secondary=True)])
    assert failure is not None and "memory" in (failure.hint or "")


def test_an_error_that_came_from_another_host_names_it() -> None:
    failure = cause({0: 6}, [make_result(0, 6, "no space", worker=5, worker_host="there")])
    assert failure is not None
    assert failure.sentence == "rank 5 on there failed: no space"


def test_a_process_that_was_ended_from_outside_is_no_other_hosts_failure() -> None:
    failure = cause({1: 143, 0: 143}, [make_result(0, 143), make_result(1, 143)], first=1)
    assert failure is not None
    assert (
        failure.sentence
        == "rank 1 on here failed: its process was terminated from outside by SIGTERM"
    )
    assert cause({1: 143, 0: 143}, [make_result(0, 143), make_result(1, 143)]) is None


def test_a_process_without_a_result_is_told_by_the_last_line_of_its_log(tmp_path: Path) -> None:
    log_path = tmp_path / "stderr.log"
    log_path.write_bytes(b"x" * 9000 + b"\nImportError: no such \xff thing\n\n")
    failure = cause({1: 1}, [], log_path=log_path)
    assert failure is not None
    assert (
        failure.message == "its process ended with exit code 1: ImportError: no such \ufffd thing"
    )
    assert failure.log_path == log_path


def test_verdicts_are_no_failures() -> None:
    assert cause({}, [make_result(0, 3, "corrupt"), make_result(1, 0)]) is None


def test_the_error_says_who_why_and_how_to_go_on_and_its_fields_hold_the_workers_own() -> None:
    failed_worker = Cause(3, "node2", "no space left.", Path("/logs/3"), {"code": "capacity"}, 7)
    failure = failure_of(
        LaunchError(failed_worker, n_restarts=2, hint="the same command goes on from there")
    )
    assert failure.exit_code == 8
    assert failure.line == (
        "rank 3 on node2 failed: no space left (after 2 restarts); the same command goes on "
        "from there"
    )
    assert failure.fields["worker"] == {"code": "capacity", "exit_code": 7}
    assert (failure.fields["rank"], failure.fields["host"], failure.fields["log"]) == (
        "3",
        "node2",
        "/logs/3",
    )


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = [
        make_result(0, 0),
        make_result(
            12, 6, "no space", fields={"code": "io"}, traceback="/x", worker=1, worker_host="h"
        ),
    ]
    for result in results:
        write_result(tmp_path, result)
    (tmp_path / "rank-3.json").write_text("{")
    (tmp_path / "rank-4.json").write_text("{}")
    assert read_results(tmp_path) == {0: results[0], 12: results[1]}
