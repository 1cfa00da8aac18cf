"""ckpt_cli.workers.work_state: what a bar and a log say about the work."""

from __future__ import annotations

from ckpt_cli.workers.work_state import clock, describe_progress, log_line, measure_work
from core.files.requests.traffic import Traffic
from core.progress import Phase

GIB = 2**30


def test_rates_are_of_all_and_the_time_left_is_of_the_slowest() -> None:
    now, before = [(6 * GIB, 10 * GIB), (2 * GIB, 10 * GIB)], [(2 * GIB, 10 * GIB), (0, 10 * GIB)]
    state = measure_work(now, before, 4.0)
    assert (state.done, state.total, state.rate, state.remaining_s) == (
        8 * GIB,
        20 * GIB,
        1.5 * GIB,
        16.0,
    )
    assert (state.last, state.last_share) == (1, 0.2)
    assert (
        describe_progress(state, "bytes", 100)
        == " 40%  8.00 GiB of 20.0 GiB  1.50 GiB/s  0:16  rank 1 is last, 20%"
    )


def test_workers_that_are_about_even_need_no_word() -> None:
    assert measure_work([(50, 100), (49, 100)], [(0, 100), (0, 100)], 1.0).last is None
    assert measure_work([(0, 0), (30, 100)], [(0, 0), (0, 100)], 1.0).last is None, (
        "one has nothing to do"
    )


def test_what_cannot_be_told_yet_is_left_out() -> None:
    state = measure_work([(0, 100), (10, 100)], [(0, 100), (0, 100)], 2.0)
    assert state.remaining_s is None, "rank 0 has not moved"
    assert (
        describe_progress(measure_work([(0, 100)], [(0, 100)], 0.0), "bytes", 100)
        == "  0%  0 B of 100 B"
    )
    assert (
        describe_progress(measure_work([(100, 100)], [(0, 100)], 2.0), "bytes", 100)
        == "100%  100 B of 100 B  50 B/s"
    )


def test_the_last_parts_go_where_the_terminal_is_narrow() -> None:
    state = measure_work([(6 * GIB, 10 * GIB), (2 * GIB, 10 * GIB)], [(0, 10 * GIB)] * 2, 4.0)
    texts = [describe_progress(state, "bytes", width) for width in (70, 48, 40, 30, 5)]
    assert [len(text.split("  ")) for text in texts] == [5, 4, 3, 2, 1]


def test_times_are_written_as_clocks() -> None:
    assert [clock(seconds) for seconds in (0.2, 61, 3600, 7325)] == [
        "0:00",
        "1:01",
        "1:00:00",
        "2:02:05",
    ]


def test_a_line_of_a_log_can_be_found_by_its_phase() -> None:
    now, before = [(6 * GIB, 10 * GIB), (2 * GIB, 10 * GIB)], [(2 * GIB, 10 * GIB), (0, 10 * GIB)]
    assert (
        log_line(Phase.COPYING, measure_work(now, before, 4.0), "bytes")
        == "copying: 8.00 GiB of 20.0 GiB (40 %), 1.50 GiB/s, 16 s left, rank 1 is last (20 %)"
    )
    files = measure_work([(2, 3)], [(0, 3)], 4.0)
    assert log_line(Phase.SYNCING, files, "files", elapsed_s=9) == "syncing: 2 of 3 files"


def test_a_phase_without_a_total_tells_its_duration() -> None:
    state = measure_work([(1024, 0)], [(0, 0)], 4.0)
    assert log_line(Phase.PLANNING, state, "files", elapsed_s=31.4) == (
        "planning: 1,024 files, 31 s so far"
    )
    assert describe_progress(state, "files", 60, elapsed_s=31.4) == "1,024 files  0:31"
    nothing = measure_work([(0, 0)], [(0, 0)], 4.0)
    assert log_line(Phase.PUBLISHING, nothing, "bytes", elapsed_s=0.2) == "publishing"
    assert log_line(Phase.PUBLISHING, nothing, "bytes", elapsed_s=125) == (
        "publishing: 2 min 05 s so far"
    )


def test_requests_to_a_store_fit_into_80_columns_with_the_rate() -> None:
    state = measure_work([(92 * GIB, 135 * GIB)], [(61 * GIB, 135 * GIB)], 10.0)
    traffic = Traffic(12_040, 13)
    assert describe_progress(state, "bytes", 120, traffic=traffic).endswith(
        "92.0 GiB of 135 GiB  3.10 GiB/s  0:14  12,040 requests (13 repeated)"
    )
    assert describe_progress(state, "bytes", 60, traffic=traffic) == (
        " 68%  92.0/135 GiB  3.10 GiB/s  0:14  12,040 req, 13 retried"
    )
    assert (
        describe_progress(state, "bytes", 40, traffic=traffic)
        == " 68%  92.0/135 GiB  3.10 GiB/s  0:14"
    )
    assert log_line(Phase.COPYING, state, "bytes", traffic=Traffic(1)).endswith(", 1 request")
