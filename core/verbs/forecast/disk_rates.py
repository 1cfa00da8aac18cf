"""Measure how fast the disks of a source and of a destination are, with little data and time.

A measurement moves at most ``SAMPLE_BYTES`` and takes about ``SAMPLE_SECONDS`` (one read or sync of
a very slow disk may take longer). It leaves nothing behind: the file that is written has no name.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from core.files.store import translate_os_errors
from core.files.syscalls import open_nameless
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.source_store import SourceStore

SAMPLE_BYTES = 64 << 20
SAMPLE_SECONDS = 0.3
_STEP_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
"""Bytes that are read at one place."""
_FIRST_PIECE_BYTES = 4 << 20
"""Bytes that are written before the first sync; each further piece is twice as large."""
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReadRate:
    """The speed at which files are read.

    Args:
        bytes_per_second: the rate.
        is_from_memory: the system did not forget the files, so the disk may be slower.
        was_cached: the files were in memory before; reading them soon may be faster.
    """

    bytes_per_second: float
    is_from_memory: bool = False
    was_cached: bool = False


@dataclass(frozen=True, slots=True)
class WriteRate:
    """The speed at which files are written.

    Args:
        bytes_per_second: the rate for large files, the wait for the disk included.
        buffered_bytes_per_second: the rate at which the system takes the bytes, without that wait.
        seconds_per_file: time to write and sync a small file.
    """

    bytes_per_second: float
    buffered_bytes_per_second: float
    seconds_per_file: float


def measure_reading(
    store: SourceStore, sizes: Mapping[str, int], *, n_bytes: int, threads: int
) -> ReadRate | None:
    """Measure how fast some of a store's files are read, at places spread over all of them.

    Args:
        store: the files.
        sizes: the files to read from, with their sizes in bytes.
        n_bytes: the bytes that will be read later; no more than these are read.
        threads: number of threads that read at the same time.

    Returns:
        None if there is nothing to read.

    Raises:
        MissingShardError, StorageError: a file cannot be read.
    """
    places = _places(sizes, min(n_bytes, SAMPLE_BYTES))
    if not places:
        return None
    # Forget the bytes, and look whether the system did. Only what was in memory is looked at again:
    # looking makes the system begin to read what was not.
    # A large page that the range covers only partly stays, so the middle of the range counts.
    cached = [
        (name, start + size // 2)
        for name, start, size in places
        if store.is_cached(name, start + size // 2)
    ]
    for name, start, size in places:
        store.drop_cached(name, start, size)
    n_kept = sum(store.is_cached(name, offset) for name, offset in cached)

    # Read, each thread at another place.
    begun = time.perf_counter()

    def read(place: tuple[str, int, int]) -> int:
        name, start, size = place
        buffer = memoryview(bytearray(min(size, _STEP_BYTES)))
        done = 0
        # At least one step, however late a busy machine starts the thread.
        while done < size and (not done or time.perf_counter() - begun < SAMPLE_SECONDS):
            step = buffer[: size - done]
            store.read_into(name, start + done, step)
            done += len(step)
        return done

    with ThreadPoolExecutor(threads) as pool:
        n_read = sum(pool.map(read, places))
    rate = n_read / (time.perf_counter() - begun)
    half = len(places) / 2
    return ReadRate(rate, is_from_memory=n_kept > half, was_cached=len(cached) > half)


def _places(sizes: Mapping[str, int], n_bytes: int) -> list[tuple[str, int, int]]:
    """Return (file, offset, bytes) of pieces that lie evenly over the concatenated files."""
    files = [(name, size) for name, size in sizes.items() if size]
    ends = list(accumulate(size for _, size in files))
    if not ends or n_bytes <= 0:
        return []
    n_bytes = min(n_bytes, ends[-1])
    n_places = -(-n_bytes // _PIECE_BYTES)
    places: dict[tuple[str, int], int] = {}
    for number in range(n_places):
        position = ends[-1] * (2 * number + 1) // (2 * n_places)
        name, size = files[index := bisect_right(ends, position)]
        # A piece stays inside its file.
        length = min(size, -(-n_bytes // n_places))
        start = min(position - (ends[index] - size), size - length)
        places[name, start] = length
    return [(name, start, length) for (name, start), length in places.items()]


def measure_writing(folder: Path, *, n_bytes: int, syncs: bool) -> WriteRate:
    """Measure how fast files are written into a directory, with a nameless temporary file.

    Args:
        folder: an existing directory.
        n_bytes: the bytes that will be written later; about so many are written at most.
        syncs: wait for the disk, as a run with fsync does.

    Raises:
        StorageError: the directory cannot be written to.
        CapacityError: the disk is full.
    """
    with translate_os_errors(str(folder), doing="write into"):
        fd = open_nameless(folder)
        try:
            # Random bytes, as a file system may compress.
            step = os.urandom(_STEP_BYTES)

            def write(start: int, size: int) -> tuple[float, float]:
                begun = time.perf_counter()
                for offset in range(start, start + size, len(step)):
                    os.pwrite(fd, step[: start + size - offset], offset)
                taken = time.perf_counter()
                if syncs:
                    os.fsync(fd)
                return taken - begun, time.perf_counter() - begun

            _, seconds_per_file = write(0, _SMALL_BYTES)
            # Larger and larger pieces, as the time for a sync hides the rate of small ones. The
            # next piece takes about as long as all before it, and once more.
            limit = min(n_bytes, SAMPLE_BYTES)
            start, elapsed, size = _SMALL_BYTES, 0.0, max(min(_FIRST_PIECE_BYTES, limit), 1)
            while True:
                buffered_seconds, seconds = write(start, size)
                start, elapsed = start + size, elapsed + seconds
                if start + 2 * size > limit + _SMALL_BYTES or 3 * elapsed > SAMPLE_SECONDS:
                    return WriteRate(size / seconds, size / buffered_seconds, seconds_per_file)
                size *= 2
        finally:
            os.close(fd)
