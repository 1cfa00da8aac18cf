"""The bytes of a torch zip's records, where they do not lie in the file as they are.

Programs that pack a zip again deflate its records::

    data/0 in the file: raw deflate (RFC 1951) ── inflated ──▶ the storage, as long as the directory states

and a machine with the other byte order (s390x) writes the numbers of its storages the other way round and the record
``byteorder`` = ``big`` beside them. A tensor in such a record has an *encoding* (``core.catalog.stored``):

* big-endian and stored as it is, in C order: units of 4 MiB, turned round one by one;
* deflated, or big-endian with strides: one unit, the whole tensor. Deflate has no random access, so every tensor that
  lies in a deflated record inflates all of it, which also checks its length and its CRC.

No more is ever made of a deflated record than the directory states, and that was compared with the deflated length.

Source: RFC 1951; torch 2.13 ``torch/serialization.py`` (``byteorder``), ``UntypedStorage.byteswap``.
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
    """How the dense bytes of a tensor are made of a record that is deflated, big-endian, or both.

    Args:
        record: the record.
        start: byte of the (inflated) record at which element 0 lies.
        strides: in elements; None for C order.
        n_bytes: length of the tensor as a dense one.
        span_bytes: from element 0 to the end of the last one in the record.
        turned_bytes: length of the numbers whose bytes are turned round; 1 if none are.
    """

    record: Record
    start: int
    strides: Shape | None
    n_bytes: int
    span_bytes: int
    turned_bytes: int

    @property
    def name(self) -> str:
        """See Encoding."""
        if self.turned_bytes == 1:
            return "deflate"
        return "big-endian" if self.record.packed_bytes is None else "big-endian deflate"

    @property
    def unit_bytes(self) -> int:
        """See Encoding."""
        return UNIT_BYTES if self._is_cut else max(1, self.n_bytes)

    @property
    def working_bytes(self) -> int:
        """See Encoding: pieces of deflated data, what is gathered from, what is turned round."""
        if self._is_cut:
            return UNIT_BYTES + UNIT_BYTES // 8
        inflated = 0 if self.record.packed_bytes is None else 4 * PIECE_BYTES + self.span_bytes // 8
        gathered = 0 if self.strides is None else self.span_bytes
        return inflated + gathered + (self.n_bytes + self.n_bytes // 8 if self.turned_bytes > 1 else 0)

    @property
    def has_checksum(self) -> bool:
        """See Encoding: inflating compares; where nothing is deflated, the record's CRC is that of the file's bytes."""
        return self.record.packed_bytes is not None and self.record.crc != 0

    @property
    def _is_cut(self) -> bool:
        return self.record.packed_bytes is None and self.strides is None

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """See Encoding.

        Raises:
            CorruptError: the deflated data are damaged.
            TruncatedError: the file ends too early.
        """
        file, itemsize = array.extent.file, DTYPES[array.dtype].itemsize
        begin = unit * self.unit_bytes
        n_bytes = min(self.unit_bytes, self.n_bytes - begin) if self.strides is None else self.span_bytes
        data = part_of_record(store, file, self.record, self.start + begin, n_bytes)
        if self.strides is not None:
            data = _gathered(data, array.shape, self.strides, itemsize)
        return _turned(data, self.turned_bytes)


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
    """The extent of a tensor whose bytes must be made; None if they lie in the record as they are.

    Args:
        offset: byte of the record at which element 0 lies.
        strides: in elements; None for C order.
        is_big: the numbers are big-endian.
    """
    turned_bytes = number_bytes(dtype) if is_big else 1
    if record.packed_bytes is None and turned_bytes == 1:
        return None
    n_bytes = span_bytes = prod(shape) * DTYPES[dtype].itemsize
    if strides is not None and n_bytes == 0:
        strides = None
    if strides is not None:
        span_bytes = DTYPES[dtype].itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
    encoding = RecordEncoding(record, offset, strides, n_bytes, span_bytes, turned_bytes)
    return Extent(file, record.offset, encoding=encoding)


def number_bytes(dtype: str) -> int:
    """Bytes of a number of a dtype: of the element, or of one part of a complex one."""
    found = DTYPES[dtype]
    return found.itemsize // 2 if found.kind == "complex" else found.itemsize


def is_big_endian(store: ReadStore, archive: Archive) -> bool:
    """Whether the storages of a torch zip are big-endian.

    Raises:
        CorruptError: its byte order is none.
    """
    order = archive.records.get("byteorder")
    if order is None:
        return False
    text = read_record(store, archive.file, order) if order.n_bytes <= 16 else b"?"
    if text not in (b"big", b"little"):
        raise CorruptError(
            f"the byte order is {text!r}, neither little nor big",
            file=archive.file,
            span=order.span,
            rule="torch.order",
        )
    return text == b"big"


def refuse_encoded(store: ReadStore, archive: Archive, record: Record) -> None:
    """Returns if the bytes of a record lie in the file as little-endian numbers.

    Raises:
        UnsupportedError: they do not.
    """
    how = "deflated" if record.packed_bytes is not None else "big-endian" if is_big_endian(store, archive) else None
    if how is not None:
        raise UnsupportedError(
            f"the numbers are {how}", file=archive.file, hint="load the checkpoint with torch and save it again"
        )


def read_pickle(store: ReadStore, file: str, record: Record) -> bytes:
    """The pickle that a record holds.

    Raises:
        CapacityError: a deflated one states more than 1 GiB.
        CorruptError, TruncatedError: it is damaged.
    """
    if record.packed_bytes is not None and record.n_bytes > MAX_PICKLE_BYTES:
        raise CapacityError(f"a pickle of {record.n_bytes} bytes, deflated", file=file, span=record.span)
    return read_record(store, file, record)


def pickle_limits(record: Record) -> PickleLimits:
    """What a record's pickle may ask for: where it is deflated, objects in proportion to what the file holds."""
    if record.packed_bytes is None:
        return DEFAULT_LIMITS
    return replace(DEFAULT_LIMITS, max_objects=min(DEFAULT_LIMITS.max_objects, 1_000_000 + 8 * record.packed_bytes))


def read_record(store: ReadStore, file: str, record: Record) -> bytes:
    """All of a record, its CRC checked where the directory states one; for small records.

    Raises:
        CorruptError, TruncatedError: it is damaged.
    """
    data = bytes(part_of_record(store, file, record, 0, record.n_bytes))
    if record.crc and record.crc != zlib.crc32(data):
        raise CorruptError(
            f"a record has the CRC-32 {zlib.crc32(data):08x}, the zip states {record.crc:08x}",
            file=file,
            span=record.span,
            hint="copy the checkpoint again, or use an older one",
            rule="torch.crc",
        )
    return data


def part_of_record(store: ReadStore, file: str, record: Record, start: int, n_bytes: int) -> bytes | memoryview:
    """Some bytes of a record, inflated if need be; then all of it is, and its CRC is checked.

    Raises:
        CorruptError: the deflated data are malformed, or have another length or CRC than the directory states.
        TruncatedError: the file ends too early.
    """
    if record.packed_bytes is None:
        return store.read(file, record.offset + start, n_bytes)
    try:
        return _inflated(store, file, record, start, start + n_bytes)
    except zlib.error as err:
        raise CorruptError(f"malformed deflated data: {err}", file=file, span=record.span) from err


def _inflated(store: ReadStore, file: str, record: Record, start: int, stop: int) -> memoryview:
    assert record.packed_bytes is not None
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    kept = bytearray()
    n_read = n_made = crc = 0
    pending = b""
    while not machine.eof:
        if not pending and n_read < record.packed_bytes:
            pending = store.read(file, record.offset + n_read, min(PIECE_BYTES, record.packed_bytes - n_read))
            n_read += len(pending)
        is_last = not pending
        piece = machine.decompress(pending, PIECE_BYTES)
        pending = machine.unconsumed_tail
        if n_made + len(piece) > record.n_bytes:
            raise CorruptError(
                f"a record inflates to more than the {record.n_bytes} bytes that the zip states",
                file=file,
                span=record.span,
            )
        if start < n_made + len(piece) and n_made < stop:
            kept += memoryview(piece)[max(0, start - n_made) : stop - n_made]
        crc = zlib.crc32(piece, crc)
        n_made += len(piece)
        if is_last and not piece and not machine.eof:
            raise CorruptError("deflated data without an end", file=file, span=record.span)
    n_left = record.packed_bytes - n_read + len(machine.unused_data)
    if n_left or n_made != record.n_bytes:
        raise CorruptError(
            f"a record inflates to {n_made} bytes and leaves {n_left}, the zip states {record.n_bytes} and 0",
            file=file,
            span=record.span,
        )
    if record.crc and crc != record.crc:
        raise CorruptError(
            f"a record has CRC-32 {crc:08x}, the zip states {record.crc:08x}", file=file, span=record.span
        )
    return memoryview(kept)


def _gathered(data: bytes | memoryview, shape: Shape, strides: Shape, itemsize: int) -> memoryview:
    """The elements of a strided view as dense ones."""
    from core.arrays.gather import copy_box

    source = StridedLayout(0, tuple(step * itemsize for step in strides))
    target = dense_layout(shape, itemsize)
    made = memoryview(bytearray(prod(shape) * itemsize))
    copy_box(memoryview(data), source, made, target, shape=shape, itemsize=itemsize)
    return made


def _turned(data: bytes | memoryview, n: int) -> bytes | memoryview:
    """Numbers of ``n`` bytes, each turned round."""
    if n == 1:
        return data
    numbers = arrays.array(_CODES[n])
    assert numbers.itemsize == n, f"this Python's {_CODES[n]!r} has {numbers.itemsize} bytes"
    numbers.frombytes(data)
    numbers.byteswap()
    return memoryview(numbers).cast("B")
