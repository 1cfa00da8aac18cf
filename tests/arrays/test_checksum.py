"""Checksums in pieces equal checksums of the whole."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from core.arrays.checksum import (
    BLOCK_BYTES,
    ArraySum,
    RunSum,
    combine_in_python,
    crc32,
    crc32_combine,
    crc32_of_zeros,
    digest_of,
)


@pytest.mark.parametrize("n", [0, 1, 7, 4096, 1 << 20, (1 << 32) + 17, (1 << 41) + 3])
def test_combining_crcs_does_not_need_zlib_ng(n: int) -> None:
    first, second = 0x12345678, 0x9ABCDEF0
    assert crc32_combine(first, second, n) == combine_in_python(first, second, n)


@given(first=st.binary(), second=st.binary())
def test_crcs_of_two_strings_combine_to_the_crc_of_both(first: bytes, second: bytes) -> None:
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@pytest.mark.parametrize("n", [0, 1, 8, 100_003])
def test_crc_of_zeros_needs_no_zeros(n: int) -> None:
    assert crc32_of_zeros(n) == zlib.crc32(bytes(n))


def test_a_digest_is_the_hash_of_the_hashes_of_its_blocks() -> None:
    data = random.Random(3).randbytes(2 * BLOCK_BYTES + 5)
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    joined = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert digest_of(data) == xxhash.xxh3_128_digest(joined)
    assert digest_of(b"") == xxhash.xxh3_128_digest(b"")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_runs_in_any_order_and_of_any_length_give_the_same_sums(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3 * BLOCK_BYTES + 100))
    content = random.Random(n).randbytes(n)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=6))})
    runs = list(pairwise(cuts))
    random.Random(n).shuffle(runs)
    array_sum = ArraySum(n, crc=True, digest=True)
    for number, (start, stop) in enumerate(runs):
        assert not array_sum.is_complete
        if data.draw(st.booleans()) or number:
            run = RunSum(start, n, crc=True, digest=True)
            middle = data.draw(st.integers(start, stop))
            run.feed(memoryview(content)[start:middle])
            run.feed(memoryview(content)[middle:stop])
            array_sum.add(run)
        else:
            array_sum.add_unsummed(stop - start)
    assert array_sum.is_complete

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = content[offset : offset + len(buffer)]

    assert array_sum.finish(read) == (zlib.crc32(content), digest_of(content))


def test_aligned_runs_need_no_reading() -> None:
    n = 2 * BLOCK_BYTES + 9
    content = bytes(range(256)) * (n // 256 + 1)
    array_sum = ArraySum(n, crc=True, digest=True)
    for start, stop in ((BLOCK_BYTES, n), (0, BLOCK_BYTES)):
        run = RunSum(start, n, crc=True, digest=True)
        run.feed(memoryview(content)[start:stop])
        array_sum.add(run)

    def read(offset: int, buffer: memoryview) -> None:
        raise AssertionError("nothing is to be read")

    assert array_sum.finish(read)[1] == digest_of(content[:n])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3 * BLOCK_BYTES // 2), min_size=1, max_size=5), st.data())
def test_what_two_processes_have_of_an_array_joins_to_the_whole(
    lengths: list[int], data: st.DataObject
) -> None:
    content = bytes(range(251)) * (sum(lengths) // 251 + 1)
    n = sum(lengths)
    content = content[:n]
    halves = [ArraySum(n, crc=True, digest=True) for _ in range(2)]
    start = 0
    for length in lengths:
        run = RunSum(start, n, crc=True, digest=True)
        run.feed(memoryview(content)[start : start + length])
        halves[data.draw(st.integers(0, 1))].add(run)
        start += length

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = content[offset : offset + len(buffer)]

    joined = ArraySum(n, crc=True, digest=True)
    for half in halves:
        part = half.part(read)
        ends = [offset + n_bytes for offset, n_bytes, _ in part.runs]
        assert all(end < run[0] for end, run in zip(ends, part.runs[1:], strict=False))
        joined.join(part)
    assert joined.is_complete and joined.finish(read) == (crc32(content), digest_of(content))
