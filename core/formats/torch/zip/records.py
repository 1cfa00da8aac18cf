"""Decoding records of a torch zip that are deflated or big-endian.

Programs that pack a zip again deflate its records::

    data/0 in the file: raw deflate (RFC 1951) ── inflated ──▶ the storage, as long as the directory states

and a machine with the other byte order (s390x) writes the numbers of its storages the other way
round and the record ``byteorder`` = ``big`` beside them. A tensor in such a record has an
*encoding* (``core.catalog.stored``):

* big-endian and stored as it is, in C order: units of 4 MiB, turned round one by one;
* deflated, or big-endian with strides: one unit, the whole tensor. Deflate has no random access, so
  every tensor that lies in a deflated record inflates all of it, which also checks its length and
  its CRC.

No more is ever made of a deflated record than the directory states, and that was compared with the
deflated length.

Source: RFC 1951; torch 2.13 ``torch/serialization.py`` (``byteorder``),
    ``UntypedStorage.byteswap``.
"""

from __future__ import annotations

import array as arrays
import zlib
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import DTYPES
from core.arrays.gather import StridedLayout, dense_layout
from core.catalog.stored import Extent, StoredArray
from core.errors import CapacityError, CorruptError, UnsupportedError
from core.formats.torch.zip.container import Archive, Record
from core.pickle.reader import DEFAULT_LIMITS, PickleLimits

if TYPE_CHECKING:
    from core.files.store import ReadStore

UNIT_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
MAX_PICKLE_BYTES = 1 << 30
_CODES = {2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class RecordEncoding:
    """How to make the dense bytes of a tensor from a record that is deflated, big-endian, or both.

    Args:
        record: the record.
        start: byte of the (inflated) record at which element 0 lies.
        strides: in elements; None for C order.
        n_bytes: length of the tensor as a dense one.
        span_bytes: bytes from element 0 to the end of the last element in the record.
        swapped_bytes: bytes of a number whose byte order is reversed; 1 if none is.
    """

    record: Record
    start: int
    strides: Shape | None
    n_bytes: int
    span_bytes: int
    swapped_bytes: int

    @property
    def name(self) -> str:
        """Return the name of the encoding."""
        if self.swapped_bytes == 1:
            return "deflate"
        return "big-endian" if self.record.packed_bytes is None else "big-endian deflate"

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit: a part of the tensor, or all of it."""
        return UNIT_BYTES if self._is_cut else max(1, self.n_bytes)

    @property
    def working_bytes(self) -> int:
        """Return the memory for decoding: deflated pieces, gathered and byte-swapped data."""
        if self._is_cut:
            return UNIT_BYTES + UNIT_BYTES // 8
        inflated = 0 if self.record.packed_bytes is None else 4 * PIECE_BYTES + self.span_bytes // 8
        gathered = 0 if self.strides is None else self.span_bytes
        return (
            inflated
            + gathered
            + (self.n_bytes + self.n_bytes // 8 if self.swapped_bytes > 1 else 0)
        )

    @property
    def has_checksum(self) -> bool:
        """Return whether decoding compares a checksum.

        Inflating does; a record that is not deflated has the CRC of the file's bytes.
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
        unit_start = unit * self.unit_bytes
        n_bytes = (
            min(self.unit_bytes, self.n_bytes - unit_start)
            if self.strides is None
            else self.span_bytes
        )
        data = part_of_record(store, file, self.record, self.start + unit_start, n_bytes)
        if self.strides is not None:
            data = _gather(data, array.shape, self.strides, itemsize)
        return _swap_bytes(data, self.swapped_bytes)


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
    """Return the extent of a tensor that must be decoded.

    None if its bytes lie in the record as they are.

    Args:
        offset: byte of the record at which element 0 lies.
        strides: in elements; None for C order.
        is_big: whether the numbers are big-endian.
    """
    swapped_bytes = number_bytes(dtype) if is_big else 1
    if record.packed_bytes is None and swapped_bytes == 1:
        return None
    n_bytes = span_bytes = prod(shape) * DTYPES[dtype].itemsize
    if strides is not None and n_bytes == 0:
        strides = None
    if strides is not None:
        span_bytes = DTYPES[dtype].itemsize * (
            1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        )
    encoding = RecordEncoding(record, offset, strides, n_bytes, span_bytes, swapped_bytes)
    return Extent(file, record.offset, encoding=encoding)


def number_bytes(dtype: str) -> int:
    """Return the bytes of a number of a dtype: of the element, or of one part of a complex one."""
    dtype_facts = DTYPES[dtype]
    return dtype_facts.itemsize // 2 if dtype_facts.kind == "complex" else dtype_facts.itemsize


def is_big_endian(store: ReadStore, archive: Archive) -> bool:
    """Return whether the storages of a torch zip are big-endian.

    Raises:
        CorruptError: the record ``byteorder`` names no byte order.
    """
    record = archive.records.get("byteorder")
    if record is None:
        return False
    text = read_record(store, archive.file, record) if record.n_bytes <= 16 else b"?"
    if text not in (b"big", b"little"):
        raise CorruptError(
            f"the byte order is {text!r}, neither little nor big",
            file=archive.file,
            span=record.span,
            rule="torch.order",
        )
    return text == b"big"


def refuse_encoded(store: ReadStore, archive: Archive, record: Record) -> None:
    """Raise unless the bytes of a record lie in the file as little-endian numbers.

    Raises:
        UnsupportedError: the record is deflated or big-endian.
    """
    encoding = (
        "deflated"
        if record.packed_bytes is not None
        else "big-endian"
        if is_big_endian(store, archive)
        else None
    )
    if encoding is not None:
        raise UnsupportedError(
            f"the numbers are {encoding}",
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
            f"a deflated pickle of {record.n_bytes >> 20:,} MiB, more than {MAX_PICKLE_BYTES >> 20:,}",
            file=file,
            span=record.span,
        )
    return read_record(store, file, record)


def pickle_limits(record: Record) -> PickleLimits:
    """Return the limits of a record's pickle.

    For a deflated one in proportion to its bytes in the file.
    """
    if record.packed_bytes is None:
        return DEFAULT_LIMITS
    return replace(
        DEFAULT_LIMITS,
        max_objects=min(DEFAULT_LIMITS.max_objects, 1_000_000 + 8 * record.packed_bytes),
    )


def read_record(store: ReadStore, file: str, record: Record) -> bytes:
    """Read all of a small record, and check its CRC if the directory states one.

    Raises:
        CorruptError, TruncatedError: the record is damaged.
    """
    data = bytes(part_of_record(store, file, record, 0, record.n_bytes))
    if record.crc and record.crc != zlib.crc32(data):
        raise CorruptError(
            f"checksum mismatch: the record has CRC-32 {zlib.crc32(data):08x}, the zip states {record.crc:08x}",
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
        CorruptError: the deflated data are malformed, or have another length or CRC than the
            directory states.
        TruncatedError: the file ends too early.
    """
    if record.packed_bytes is None:
        return store.read(file, record.offset + start, n_bytes)
    try:
        return _inflate(store, file, record, start, start + n_bytes)
    except zlib.error as err:
        raise CorruptError(f"damaged deflated data: {err}", file=file, span=record.span) from err


def _inflate(store: ReadStore, file: str, record: Record, start: int, stop: int) -> memoryview:
    """Inflate a record piece by piece, check its length and CRC, and return bytes [start, stop) of
    it.
    """
    assert record.packed_bytes is not None
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    result = bytearray()
    n_read = n_inflated = crc = 0
    pending = b""
    # Inflate in small pieces, and keep the bytes that were asked for.
    while not machine.eof:
        if not pending and n_read < record.packed_bytes:
            pending = store.read(
                file, record.offset + n_read, min(PIECE_BYTES, record.packed_bytes - n_read)
            )
            n_read += len(pending)
        is_last = not pending
        piece = machine.decompress(pending, PIECE_BYTES)
        pending = machine.unconsumed_tail
        if n_inflated + len(piece) > record.n_bytes:
            raise CorruptError(
                f"a record inflates to more than the {record.n_bytes} bytes that the zip states",
                file=file,
                span=record.span,
            )
        if start < n_inflated + len(piece) and n_inflated < stop:
            result += memoryview(piece)[max(0, start - n_inflated) : stop - n_inflated]
        crc = zlib.crc32(piece, crc)
        n_inflated += len(piece)
        if is_last and not piece and not machine.eof:
            raise CorruptError("deflated data is incomplete", file=file, span=record.span)
    # Compare length and CRC of all of it.
    n_unused = record.packed_bytes - n_read + len(machine.unused_data)
    if n_unused or n_inflated != record.n_bytes:
        raise CorruptError(
            f"a record inflates to {n_inflated} bytes and leaves {n_unused}, the zip states {record.n_bytes} and 0",
            file=file,
            span=record.span,
        )
    if record.crc and crc != record.crc:
        raise CorruptError(
            f"checksum mismatch: the record has CRC-32 {crc:08x}, the zip states {record.crc:08x}",
            file=file,
            span=record.span,
        )
    return memoryview(result)


def _gather(data: bytes | memoryview, shape: Shape, strides: Shape, itemsize: int) -> memoryview:
    """Return the elements of a strided view as dense ones."""
    from core.arrays.gather import copy_box

    source = StridedLayout(0, tuple(step * itemsize for step in strides))
    target = dense_layout(shape, itemsize)
    result = memoryview(bytearray(prod(shape) * itemsize))
    copy_box(memoryview(data), source, result, target, shape=shape, itemsize=itemsize)
    return result


def _swap_bytes(data: bytes | memoryview, n: int) -> bytes | memoryview:
    """Return numbers of ``n`` bytes with their bytes in reverse order."""
    if n == 1:
        return data
    numbers = arrays.array(_CODES[n])
    assert numbers.itemsize == n, f"this Python's {_CODES[n]!r} has {numbers.itemsize} bytes"
    numbers.frombytes(data)
    numbers.byteswap()
    return memoryview(numbers).cast("B")
