"""Compute checksums of objects during the scan, to be compared with those that their store states.

CRCs of segments are combined, so that threads and ranks may divide an object; hashes need its bytes
in order. CRC-64/NVME is computed by awscrt, the library of AWS, where it is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import TypeAlias

from core.arrays.checksum import crc32
from core.arrays.crc import CRC32, CRC32C, CRC64_NVME, Crc
from core.files.stated.checksum import SUM_BYTES, RangeSum, StatedChecksum

CRCS: Mapping[str, Crc] = {"CRC-32": CRC32, "CRC-32C": CRC32C, "CRC-64/NVME": CRC64_NVME}
"""Algorithm → kind of CRC."""
_HASHES = {"SHA-256": hashlib.sha256, "SHA-1": hashlib.sha1, "MD5": hashlib.md5}
_CRC_OF: TypeAlias = Callable[[memoryview, int], int]
"""Computes the CRC of bytes, continuing from that of earlier ones."""


def missing_package(algorithm: str) -> str | None:
    """Return the name of the package that an algorithm needs, if it is not installed."""
    is_missing = algorithm == "CRC-64/NVME" and importlib.util.find_spec("awscrt") is None
    return "awscrt" if is_missing else None


def choose_checksum(checksums: tuple[StatedChecksum, ...]) -> StatedChecksum | None:
    """Return the checksum of an object that is the fastest to compare; None if none can be."""
    usable = [
        checksum
        for checksum in checksums
        if checksum.ranges and missing_package(checksum.algorithm) is None
    ]
    order = list(SUM_BYTES)
    return min(usable, key=lambda checksum: order.index(checksum.algorithm), default=None)


def whole_crc(checksum: StatedChecksum) -> str:
    """Return the CRC of a whole object, hexadecimal, combined from those of its parts."""
    crc = CRCS[checksum.algorithm]
    total = 0
    for part in checksum.ranges:
        total = crc.combine(total, int(part.value, 16), part.stop - part.start)
    return f"{total:0{crc.width // 4}x}"


class ObjectCrcs:
    """The CRCs of objects, combined from segments in any order (a ``FileObserver``).

    Args:
        algorithms: name of an object → key of ``CRCS``.
    """

    in_order = False

    def __init__(self, algorithms: Mapping[str, str]) -> None:
        self._algorithms = algorithms
        # Object → end of a run of bytes → its start and CRC.
        self._runs: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in algorithms}
        self._lock = Lock()

    def reads(self, file: str, n_bytes: int) -> bool:
        return file in self._algorithms

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Add bytes to the run that ends at their offset; without one, a new run begins."""
        runs = self._runs[file]
        with self._lock:
            start, crc = runs.pop(offset, (offset, 0))
        crc = _crc_function(self._algorithms[file])(data, crc)
        with self._lock:
            runs[offset + len(data)] = start, crc

    def finish_file(self, file: str) -> None:
        """Do nothing; see ``crc_of``."""

    def state(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return the runs of this rank, to be merged on the lead rank."""
        return self._runs

    def merge(self, state: dict[str, dict[int, tuple[int, int]]]) -> None:
        """Add the runs of another rank."""
        for name, runs in state.items():
            self._runs[name] |= runs

    def crc_of(self, file: str, n_bytes: int) -> str | None:
        """Return the CRC of an object, hexadecimal; None if a part of it has not been read."""
        crc = CRCS[self._algorithms[file]]
        total = end = 0
        for stop, (start, value) in sorted(self._runs[file].items(), key=lambda run: run[1]):
            if start != end:
                return None
            total, end = crc.combine(total, value, stop - start), stop
        return f"{total:0{crc.width // 4}x}" if end == n_bytes else None


@cache
def _crc_function(algorithm: str) -> _CRC_OF:
    """Return the function of a CRC."""
    if algorithm == "CRC-32C":
        import google_crc32c

        return lambda data, crc: int(google_crc32c.extend(crc, bytes(data)))
    if algorithm == "CRC-64/NVME":
        from awscrt.checksums import crc64nvme

        return lambda data, crc: int(crc64nvme(data, crc))
    return lambda data, crc: crc32(data, crc)


class ObjectHashes:
    """The hashes of objects or of their parts, from bytes in order (a ``FileObserver``).

    Args:
        checksums: name of an object → the checksum to compute.

    Attributes:
        sums: name of an object that was read → the hashes of its ranges.
    """

    in_order = True

    def __init__(self, checksums: Mapping[str, StatedChecksum]) -> None:
        self._checksums = checksums
        self._open: dict[str, list[hashlib._Hash]] = {}
        self._lock = Lock()
        self.sums: dict[str, list[str]] = {}

    def reads(self, file: str, n_bytes: int) -> bool:
        return file in self._checksums

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Add the next bytes of an object to the hashes of the ranges that they belong to."""
        ranges = self._checksums[file].ranges
        hashes = self._hashes_of(file)
        for part, state in zip(ranges, hashes, strict=True):
            start, stop = max(part.start, offset), min(part.stop, offset + len(data))
            if start < stop:
                state.update(data[start - offset : stop - offset])

    def finish_file(self, file: str) -> None:
        """Store the hashes of an object, which has been read to its end."""
        hashes = self._hashes_of(file)
        with self._lock:
            self.sums[file] = [state.hexdigest() for state in hashes]
            del self._open[file]

    def state(self) -> dict[str, list[str]]:
        """Return the hashes computed on this rank, to be merged on the lead rank."""
        return self.sums

    def merge(self, state: dict[str, list[str]]) -> None:
        """Add the hashes of another rank."""
        self.sums |= state

    def first_difference(self, file: str) -> tuple[RangeSum, str] | None:
        """Return the first range whose hash differs from the stated one, with its actual hash."""
        for part, actual in zip(self._checksums[file].ranges, self.sums[file], strict=True):
            if part.value != actual:
                return part, actual
        return None

    def _hashes_of(self, file: str) -> list[hashlib._Hash]:
        """Return the hashes of an object that are being computed; one thread has the object."""
        with self._lock:
            checksum = self._checksums[file]
            make = _HASHES[checksum.algorithm]
            return self._open.setdefault(file, [make() for _ in checksum.ranges])
