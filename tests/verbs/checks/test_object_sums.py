"""Checksums of objects are the same however the bytes are divided."""

from __future__ import annotations

import hashlib
import random
import zlib
from itertools import pairwise
from typing import Any

import google_crc32c
import pytest

from core.arrays.crc import CRC32, CRC32C, CRC64_NVME, Crc
from core.files.stated.checksum import RangeSum, StatedChecksum
from core.verbs.checks.content.object_sums import (
    ObjectCrcs,
    ObjectHashes,
    choose_checksum,
    whole_crc,
)
from tests.support.crc64 import HAS_AWSCRT, crc64_nvme

DATA = random.Random(1).randbytes(5000)
CUTS = [0, 1, 700, 701, 3000, 5000]


FUNCTIONS = {
    "CRC-32": (CRC32, zlib.crc32),
    "CRC-32C": (CRC32C, google_crc32c.value),
    "CRC-64/NVME": (CRC64_NVME, crc64_nvme),
}


def test_the_bitwise_definition_is_the_catalogue_s() -> None:
    assert crc64_nvme(b"123456789") == 0xAE8B14860A799888


@pytest.mark.parametrize(("crc", "function"), FUNCTIONS.values())
def test_crcs_combine(crc: Crc, function: Any) -> None:
    for cut in CUTS:
        first, second = DATA[:cut], DATA[cut:]
        combined = crc.combine(function(first), function(second), len(second))
        assert combined == function(DATA)


def test_the_crc_of_an_object_is_combined_from_those_of_its_parts() -> None:
    for algorithm, (crc, function) in FUNCTIONS.items():
        width = crc.width // 4
        parts = tuple(
            RangeSum(start, stop, f"{function(DATA[start:stop]):0{width}x}")
            for start, stop in pairwise(CUTS)
        )
        assert whole_crc(StatedChecksum(algorithm, parts)) == f"{function(DATA):0{width}x}"


@pytest.mark.parametrize(
    "algorithm",
    [
        "CRC-32C",
        pytest.param(
            "CRC-64/NVME",
            marks=pytest.mark.skipif(not HAS_AWSCRT, reason="awscrt is not installed"),
        ),
    ],
)
def test_segments_come_in_any_order_and_from_several_ranks(algorithm: str) -> None:
    expected = f"{FUNCTIONS[algorithm][1](DATA):0{FUNCTIONS[algorithm][0].width // 4}x}"
    ranks = [ObjectCrcs({"a": algorithm, "empty": algorithm}) for _ in range(2)]
    segments = list(enumerate(pairwise(CUTS)))
    random.Random(2).shuffle(segments)
    for number, (start, stop) in segments:
        assert ranks[0].crc_of("a", len(DATA)) is None
        middle = (start + stop) // 2
        for first, last in ((start, middle), (middle, stop)):
            if first < last:
                ranks[number % 2].feed_file("a", first, memoryview(bytearray(DATA[first:last])))
    ranks[0].merge(ranks[1].state())
    assert ranks[0].crc_of("a", len(DATA)) == expected
    assert ranks[0].crc_of("a", len(DATA) + 1) is None
    assert ranks[0].crc_of("empty", 0) == "0" * len(expected)


def test_hashes_of_parts() -> None:
    parts = tuple(
        RangeSum(start, stop, hashlib.sha256(DATA[start:stop]).hexdigest())
        for start, stop in pairwise(CUTS)
    )
    hashes = ObjectHashes({"a": StatedChecksum("SHA-256", parts)})
    damaged = bytearray(DATA)
    damaged[2999] ^= 1
    for data, difference in ((DATA, None), (damaged, 3)):
        for start in range(0, len(data), 999):
            hashes.feed_file("a", start, memoryview(data)[start : start + 999])
        hashes.finish_file("a")
        place = hashes.first_difference("a")
        assert (None if place is None else parts.index(place[0])) == difference


def test_the_fastest_checksum_that_can_be_compared_is_taken() -> None:
    md5 = StatedChecksum("MD5", (RangeSum(0, 1, "00" * 16),))
    crc32c = StatedChecksum("CRC-32C", (RangeSum(0, 1, "00" * 4),))
    assert choose_checksum((md5, crc32c)) is crc32c
    assert choose_checksum((md5, StatedChecksum("CRC-32", ()))) is md5
    assert choose_checksum((StatedChecksum("CRC-32", ()),)) is None
