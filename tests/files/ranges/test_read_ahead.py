"""Announced ranges are fetched once, in few requests, and no more of them than there is memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import pytest

from core.errors import StorageError
from core.files.ranges import MAX_PART_BYTES, MERGE_BYTES, ReadAhead, ReadingMemory, divide_memory

MIB = 1 << 20
CONTENT = {name: Random(name).randbytes(3 * MIB) for name in ("a", "b")}


class Recorder:
    """Fetches ranges of ``CONTENT``, and counts their bytes in memory."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def fetch(self, name: str, offset: int, n_bytes: int) -> memoryview:
        self.asked.append((name, offset, n_bytes))
        return memoryview(CONTENT[name][offset : offset + n_bytes])


def ahead_of(recorder: Recorder, threads: ThreadPoolExecutor, **memory: int) -> ReadAhead:
    defaults = {"kept_bytes": 0, "ahead_bytes": MIB, "part_bytes": 256 << 10}
    return ReadAhead(recorder.fetch, lambda: threads, ReadingMemory(**(defaults | memory)))


def read(ahead: ReadAhead, recorder: Recorder, name: str, offset: int, n_bytes: int) -> bytes:
    buffer = bytearray(n_bytes)

    def read_rest(start: int, view: memoryview) -> None:
        view[:] = recorder.fetch(name, start, len(view))

    ahead.read_into(name, offset, memoryview(buffer), read_rest)
    return bytes(buffer)


@pytest.mark.parametrize("seed", range(8))
def test_any_announced_ranges_are_read_as_they_are_and_fetched_once(seed: int) -> None:
    random = Random(seed)
    recorder = Recorder()
    # Disjoint ranges of different lengths, with and without gaps, in batches.
    ranges = []
    for name in CONTENT:
        position = 0
        while position < 2 * MIB:
            n_bytes = random.choice([1, 100, 5_000, 300_000])
            ranges.append((name, position, position + n_bytes))
            position += n_bytes + random.choice([0, 0, 10, MERGE_BYTES + 1])
    with ThreadPoolExecutor(4) as threads:
        ahead = ahead_of(recorder, threads)
        for start in range(0, len(ranges), 7):
            batch = ranges[start : start + 7]
            ahead.expect(batch)
            random.shuffle(batch)
            for name, first, stop in batch:
                assert read(ahead, recorder, name, first, stop - first) == CONTENT[name][first:stop]
        assert not ahead._parts
        assert ahead._n_bytes == 0
    fetched: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for name, offset, n_bytes in recorder.asked:
        assert n_bytes <= 256 << 10
        fetched[name].append((offset, offset + n_bytes))
    for spans in fetched.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_a_range_that_is_announced_twice_is_fetched_once() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(2) as threads:
        ahead = ahead_of(recorder, threads)
        ahead.expect([("a", 0, 1000), ("a", 500, 2000)])
        ahead.expect([("a", 0, 1000)])
        for start, stop in ((0, 1000), (500, 2000), (0, 1000)):
            assert read(ahead, recorder, "a", start, stop - start) == CONTENT["a"][start:stop]
    assert recorder.asked == [("a", 0, 2000)]


def test_what_was_not_announced_is_read_at_once() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(2) as threads:
        ahead = ahead_of(recorder, threads)
        ahead.expect([("a", 1000, 2000)])
        assert read(ahead, recorder, "a", 500, 3000) == CONTENT["a"][500:3500]
    assert sorted(recorder.asked) == [("a", 500, 500), ("a", 1000, 1000), ("a", 2000, 1500)]


def test_no_more_is_fetched_than_there_is_memory_until_something_is_read() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(4) as threads:
        ahead = ahead_of(recorder, threads)
        ahead.expect([("a", 0, 3 * MIB)])
        threads.submit(lambda: None).result()
        assert sum(n_bytes for _, _, n_bytes in recorder.asked) <= MIB
        assert ahead._n_bytes == MIB
        for start in range(0, 3 * MIB, 100_000):
            n_bytes = min(100_000, 3 * MIB - start)
            assert read(ahead, recorder, "a", start, n_bytes) == CONTENT["a"][start:][:n_bytes]
            assert ahead._n_bytes <= MIB
    assert len(recorder.asked) == 12


def test_ranges_that_nobody_reads_do_not_stop_the_others() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(2) as threads:
        ahead = ahead_of(recorder, threads)
        ahead.expect([("b", 0, 3 * MIB)])
        for number in range(64):
            start = number * 1000
            ahead.expect([("a", start, start + 1000)])
            assert read(ahead, recorder, "a", start, 1000) == CONTENT["a"][start : start + 1000]
        assert ahead._n_bytes < MIB


def test_the_reader_gets_the_error_of_the_request() -> None:
    def fail(name: str, offset: int, n_bytes: int) -> memoryview:
        raise StorageError("refused", file=name)

    with ThreadPoolExecutor(2) as threads:
        ahead = ReadAhead(fail, lambda: threads, ReadingMemory(0, MIB, MIB))
        ahead.expect([("a", 0, 1000)])
        with pytest.raises(StorageError, match="refused"):
            ahead.read_into("a", 10, memoryview(bytearray(10)), lambda *_: None)


def test_several_threads_read_what_was_announced() -> None:
    recorder = Recorder()
    is_equal = []
    with ThreadPoolExecutor(4) as threads:
        ahead = ahead_of(recorder, threads, ahead_bytes=512 << 10)

        def work(name: str) -> None:
            for start in range(0, 3 * MIB, MIB):
                ahead.expect([(name, start, start + MIB)])
                for first in range(start, start + MIB, 64 << 10):
                    data = read(ahead, recorder, name, first, 64 << 10)
                    is_equal.append(data == CONTENT[name][first : first + (64 << 10)])

        workers = [threading.Thread(target=work, args=(name,)) for name in CONTENT]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert all(is_equal)
    assert sum(n_bytes for _, _, n_bytes in recorder.asked) == 6 * MIB


def test_reading_takes_less_memory_of_a_small_limit() -> None:
    sizes = [
        divide_memory(limit, n_requests=16).n_bytes(2)
        for limit in (64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, None)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] <= 12 * MIB
    assert sizes[-1] <= 112 * MIB
    assert divide_memory(None, n_requests=16).part_bytes == MAX_PART_BYTES
