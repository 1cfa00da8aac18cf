"""Decoding records of a torch zip that are deflated or big-endian.

Programs that repack a zip deflate its records::

    data/0 in the file: raw deflate (RFC 1951) ── inflated ──▶ the storage, as long as the
                                                                directory records

A machine with the other byte order (s390x) writes the numbers in its storages with their bytes
reversed, and the record ``byteorder`` = ``big``. A tensor in such a record has an *encoding*
(``core.engine.catalog.stored``):

* big-endian and not deflated, in C order: units of 4 MiB, byte-swapped one by one;
* deflated, or big-endian with strides: one unit, the complete tensor. Deflate has no random access,
  so decoding a tensor inflates its entire record, which also checks the record's length and CRC.

A deflated record is never inflated beyond its length in the directory, and that length is plausible
for its deflated one.

Source: RFC 1951; torch 2.13 ``torch/serialization.py`` (``byteorder``),
    ``UntypedStorage.byteswap``.
"""

from __future__ import annotations

import array as arrays
import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import DTYPES
from core.arrays.gather import StridedLayout, byte_span, copy_box, dense_layout
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CapacityError, CorruptError, UnsupportedError
from core.formats.torch.zip.container import Archive, Record
from core.pickle.reader import DEFAULT_LIMITS, PickleLimits
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

UNIT_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
"""Bytes that are read, and bytes that are inflated, at once."""
MAX_PICKLE_BYTES = 1 << 30
_CODES = {2: "H", 4: "I", 8: "Q"}
"""Bytes per number → type code of Python's ``array``."""


@dataclass(frozen=True, slots=True)
class RecordEncoding:
    """The decoding of a tensor in a record that is deflated, big-endian, or both.

    Args:
        record: the record.
        start: byte offset of element 0 in the (inflated) record.
        strides: in elements; None for C order.
        n_bytes: length of the dense tensor.
        span_bytes: bytes from element 0 to the end of the last element in the record.
        swapped_bytes: bytes per number whose byte order is reversed; 1 if none is.
    """

    record: Record
    start: int
    strides: Shape | None
    n_bytes: int
    span_bytes: int
    swapped_bytes: int

    @property
    def name(self) -> str:
        """Name of the encoding, for people."""
        if self.swapped_bytes == 1:
            return "deflate"
        return "big-endian" if self.record.packed_bytes is None else "big-endian deflate"

    @property
    def unit_bytes(self) -> int:
        """Bytes per unit: a part of the tensor, or all of it."""
        return UNIT_BYTES if self._is_cut else max(1, self.n_bytes)

    @property
    def working_bytes(self) -> int:
        """Memory for decoding, in bytes: inflated, gathered and byte-swapped data."""
        if self._is_cut:
            return UNIT_BYTES + UNIT_BYTES // 8
        # Growing buffers are allocated with an eighth to spare.
        inflated = 0 if self.record.packed_bytes is None else 4 * PIECE_BYTES + self.span_bytes // 8
        gathered = 0 if self.strides is None else self.span_bytes
        swapped = self.n_bytes + self.n_bytes // 8 if self.swapped_bytes > 1 else 0
        return inflated + gathered + swapped

    @property
    def has_checksum(self) -> bool:
        """True if decoding compares a checksum.

        Inflating does. A record that is not deflated has the CRC of the bytes in the file.
        """
        return self.record.packed_bytes is not None and self.record.crc != 0

    @property
    def _is_cut(self) -> bool:
        return self.record.packed_bytes is None and self.strides is None

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the dense bytes of a unit of the tensor.

        Raises:
            CorruptError: the deflated data are damaged.
            TruncatedError: the file ends too early.
        """
        file, itemsize = array.extent.file, DTYPES[array.dtype].itemsize
        # Read the unit; with strides, everything from the first to the last element.
        unit_start = unit * self.unit_bytes
        n_bytes = min(self.unit_bytes, self.n_bytes - unit_start)
        if self.strides is not None:
            n_bytes = self.span_bytes
        data = part_of_record(store, file, self.record, self.start + unit_start, n_bytes)
        # Copy strided elements to dense ones.
        if self.strides is not None:
            source = StridedLayout(0, tuple(step * itemsize for step in self.strides))
            target = dense_layout(array.shape, itemsize)
            dense = memoryview(bytearray(self.n_bytes))
            copy_box(memoryview(data), source, dense, target, shape=array.shape, itemsize=itemsize)
            data = dense
        # Reverse the bytes of each number.
        if self.swapped_bytes == 1:
            return data
        code = _CODES[self.swapped_bytes]
        numbers = arrays.array(code)
        assert numbers.itemsize == self.swapped_bytes, f"{code!r} has {numbers.itemsize} bytes"
        numbers.frombytes(data)
        numbers.byteswap()
        return memoryview(numbers).cast("B")


def encoded(
    file: str,
    record: Record,
    *,
    dtype: str,
    shape: Shape,
    offset: int,
    strides: Shape | None,
    is_big: bool,
) -> Extent | None:
    """Return the extent of a tensor that must be decoded; None if it can be read as it is.

    Args:
        offset: byte offset of element 0 in the (inflated) record.
        strides: in elements; None for C order.
        is_big: whether the numbers are big-endian.
    """
    swapped_bytes = number_bytes(dtype) if is_big else 1
    if record.packed_bytes is None and swapped_bytes == 1:
        return None
    n_bytes = span_bytes = prod(shape) * DTYPES[dtype].itemsize
    # The strides of an empty tensor mean nothing.
    if n_bytes == 0:
        strides = None
    if strides is not None:
        span_bytes = DTYPES[dtype].itemsize * byte_span(shape, 1, strides)
    encoding = RecordEncoding(record, offset, strides, n_bytes, span_bytes, swapped_bytes)
    return Extent(file, record.offset, encoding=encoding)


def number_bytes(dtype: str) -> int:
    """Return the bytes per number of a dtype; an element of a complex dtype has two numbers."""
    dtype_facts = DTYPES[dtype]
    return dtype_facts.itemsize // 2 if dtype_facts.kind == "complex" else dtype_facts.itemsize


def is_big_endian(store: ReadStore, archive: Archive) -> bool:
    """Return whether the storages of a torch zip are big-endian.

    Raises:
        CorruptError: the record ``byteorder`` is neither ``big`` nor ``little``.
    """
    # torch before 2.1 does not write the record.
    record = archive.records.get("byteorder")
    if record is None:
        return False
    text = read_record(store, archive.file, record) if record.n_bytes <= 16 else b"?"
    if text not in (b"big", b"little"):
        raise CorruptError(
            f"the byte order is {text.decode('ascii', 'replace')!r}; expected 'little' or 'big'",
            file=archive.file,
            span=record.span,
            rule="torch.order",
        )
    return text == b"big"


def refuse_encoded(store: ReadStore, archive: Archive, record: Record) -> None:
    """Raise unless a record contains little-endian numbers and is not deflated.

    Raises:
        UnsupportedError: the record is deflated or big-endian.
    """
    is_deflated = record.packed_bytes is not None
    if is_deflated or is_big_endian(store, archive):
        raise UnsupportedError(
            f"the item's data is {'deflated' if is_deflated else 'big-endian'}, which ckpt does "
            "not support",
            file=archive.file,
            hint="load the checkpoint with torch and save it again",
        )


def read_pickle(store: ReadStore, file: str, record: Record) -> bytes:
    """Read the pickle in a record.

    Raises:
        CapacityError: a deflated pickle has more than 1 GiB.
        CorruptError, TruncatedError: the record is damaged.
    """
    if record.packed_bytes is not None and record.n_bytes > MAX_PICKLE_BYTES:
        raise CapacityError(
            f"a deflated pickle is {record.n_bytes >> 20:,} MiB long; the limit is "
            f"{MAX_PICKLE_BYTES >> 20:,} MiB",
            file=file,
            span=record.span,
        )
    return read_record(store, file, record)


def pickle_limits(record: Record) -> PickleLimits:
    """Return the limits for reading a record's pickle.

    Those of a deflated pickle are proportional to its bytes in the file, so that a small file
    cannot fill the memory.
    """
    if record.packed_bytes is None:
        return DEFAULT_LIMITS
    return replace(
        DEFAULT_LIMITS,
        max_objects=min(DEFAULT_LIMITS.max_objects, 1_000_000 + 8 * record.packed_bytes),
    )


def read_record(store: ReadStore, file: str, record: Record) -> bytes:
    """Read all of a small record, and check its CRC if the directory contains one.

    Raises:
        CorruptError, TruncatedError: the record is damaged.
    """
    data = bytes(part_of_record(store, file, record, 0, record.n_bytes))
    if record.crc and record.crc != zlib.crc32(data):
        raise CorruptError(
            f"checksum mismatch: the record's CRC-32 is {zlib.crc32(data):08x}, but the zip's "
            f"directory records {record.crc:08x}",
            file=file,
            span=record.span,
            hint="copy the checkpoint again, or use an older one",
            rule="torch.crc",
        )
    return data


def part_of_record(
    store: ReadStore, file: str, record: Record, start: int, n_bytes: int
) -> bytes | memoryview:
    """Read some bytes of a record; a deflated one is inflated completely, and its CRC checked.

    Raises:
        CorruptError: the deflated data is malformed, or its length or CRC differs from that in the
            directory.
        TruncatedError: the file ends too early.
    """
    if record.packed_bytes is None:
        return store.read(file, record.offset + start, n_bytes)
    stop = start + n_bytes
    result = bytearray()
    n_inflated = crc = 0
    # Inflate in small parts, so that a false length cannot fill the memory, and keep the
    # requested bytes.
    for part in _inflate(store, file, record):
        if n_inflated + len(part) > record.n_bytes:
            raise CorruptError(
                f"a record inflates to more than the {record.n_bytes} bytes that the zip's "
                "directory records",
                file=file,
                span=record.span,
            )
        if start < n_inflated + len(part) and n_inflated < stop:
            result += memoryview(part)[max(0, start - n_inflated) : stop - n_inflated]
        crc = zlib.crc32(part, crc)
        n_inflated += len(part)
    # Compare length and CRC of the entire record.
    if n_inflated != record.n_bytes:
        raise CorruptError(
            f"a record inflates to {n_inflated} bytes, but the zip's directory records "
            f"{record.n_bytes}",
            file=file,
            span=record.span,
        )
    if record.crc and crc != record.crc:
        raise CorruptError(
            f"checksum mismatch: the record's CRC-32 is {crc:08x}, but the zip's directory records "
            f"{record.crc:08x}",
            file=file,
            span=record.span,
        )
    return memoryview(result)


def _inflate(store: ReadStore, file: str, record: Record) -> Iterator[bytes]:
    """Yield the inflated data of a record, in parts of at most ``PIECE_BYTES``.

    Raises:
        CorruptError: the deflated data is malformed, incomplete, or longer than its stream.
        TruncatedError: the file ends too early.
    """
    assert record.packed_bytes is not None
    # Negative window bits mean raw deflate, without zlib's header and checksum.
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    n_read = 0
    pending = b""
    while not inflater.eof:
        if not pending and n_read < record.packed_bytes:
            pending = store.read(
                file, record.offset + n_read, min(PIECE_BYTES, record.packed_bytes - n_read)
            )
            n_read += len(pending)
        try:
            part = inflater.decompress(pending, PIECE_BYTES)
        except zlib.error as err:
            raise CorruptError(
                f"the record's deflated data is damaged: {err}", file=file, span=record.span
            ) from err
        # Even without input there may be output left, so only both missing means an early end.
        if not pending and not part and not inflater.eof:
            raise CorruptError(
                "the record's deflated data is incomplete", file=file, span=record.span
            )
        pending = inflater.unconsumed_tail
        yield part
    # The deflated data must fill the record.
    n_unused = record.packed_bytes - n_read + len(inflater.unused_data)
    if n_unused:
        raise CorruptError(
            f"the record has {n_unused} unexpected bytes after its deflated data",
            file=file,
            span=record.span,
        )
