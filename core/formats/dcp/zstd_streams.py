"""DCP items that went through a stream transform: zstd frames around the torch zip.

On disk: where a plain item has ``archive/…`` zip bytes, a transformed one has those bytes as one or more zstd frames.
``.metadata`` names the transforms of every item (``transform_descriptors``) and the length of what is stored; how long
the zip is stands nowhere. The transform that torch applied last is named last, so reading undoes them from the end of
the list to its begin (torch 2.13 goes from the begin, which differs once two kinds exist).

There is no random access: an item is inflated whole. What may come out is bounded by the tensor that ``.metadata``
states, and the window of a frame by the 8 MiB that every zstd decoder supports (torch's level needs 2).

Source: torch 2.13 ``torch/distributed/checkpoint/{_extension,filesystem}.py``; RFC 8878 for the frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from core.catalog.stored import Extent, StoredArray
from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.torch.format import item_location, load_object

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.dcp.columns import DcpItem

ZIP_OVERHEAD_BYTES = 1 << 16
"""Most that a torch zip of one tensor is longer than the tensor."""

MAX_WINDOW_BYTES = 8 << 20
_READ_BYTES = 1 << 18
_OBJECT_BYTES = 64 << 20
_OBJECT_RATIO = 100


@dataclass(frozen=True, slots=True)
class StreamItem:
    """The encoding of a transformed item; the array's extent says where the stored bytes begin.

    Args:
        transforms: descriptors, as torch lists them.
        stored_bytes: length of the item in its file.
        dense_bytes: of the array.
        place: byte offset of the array in the inflated item, and its strides in elements (None for C order); None if
            the item is one tensor, which tells both.
        inflated_bytes: most bytes that the item inflates to.
    """

    transforms: tuple[str, ...]
    stored_bytes: int
    dense_bytes: int
    place: tuple[int, Shape | None] | None = None
    inflated_bytes: int = 0

    @property
    def name(self) -> str:
        """See Encoding."""
        return " of ".join("zstd" for _ in self.transforms)

    @property
    def unit_bytes(self) -> int:
        """See Encoding: the whole array."""
        return max(self.dense_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """See Encoding: the inflated item, which also is the unit where the array is contiguous in it."""
        return self._limit + len(self.transforms) * (MAX_WINDOW_BYTES + _READ_BYTES)

    @property
    def _limit(self) -> int:
        return self.inflated_bytes or self.dense_bytes + ZIP_OVERHEAD_BYTES

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """See Encoding.

        Raises:
            CorruptError: not such a stream, or one that holds another tensor or too many bytes.
            TruncatedError: the item, or the file, ends too early.
            UnsupportedError: the item holds what is not handled.
        """
        extent = array.extent
        assert unit == 0
        span = (extent.offset, extent.offset + self.stored_bytes)
        try:
            data = inflated(store, extent.file, span, self.transforms, limit=self._limit)
            place = self.place
            if place is None:
                whole = Extent(extent.file, 0, item_bytes=len(data))
                found = item_location(_memory(extent.file, data), replace(array, extent=whole)).extent
                assert found is not None
                place = found.offset, found.strides
        except CheckpointingException as err:
            err.file, err.key, err.span = extent.file, array.name, span
            raise
        return _dense(data, array, *place)


def inflated_object(
    store: ReadStore, item: DcpItem, transforms: tuple[str, ...], *, key: str
) -> tuple[object, Mapping[str, StoredArray]]:
    """The value of a transformed object, and the arrays of the tensors in it.

    Args:
        item: where it lies.
        key: the object's.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: it cannot be read.
    """
    span = (item.offset, item.offset + item.n_bytes)
    try:
        data = inflated(store, item.file, span, transforms, limit=_OBJECT_BYTES + _OBJECT_RATIO * item.n_bytes)
        stream = StoredArray(key, "uint8", (len(data),), Extent(item.file, 0))
        value, arrays = load_object(_memory(item.file, data), stream, key=key)
    except CheckpointingException as err:
        err.file, err.key, err.span = item.file, key, span
        raise
    return value, {name: _encoded(array, item, transforms, len(data)) for name, array in arrays.items()}


def _encoded(array: StoredArray, item: DcpItem, transforms: tuple[str, ...], inflated_bytes: int) -> StoredArray:
    """An array inside an inflated object, as an array of the checkpoint."""
    place = array.extent.offset, array.extent.strides
    encoding = StreamItem(transforms, item.n_bytes, array.n_bytes, place, inflated_bytes)
    return replace(array, extent=Extent(item.file, item.offset, encoding=encoding))


def _memory(file: str, data: bytearray) -> MemoryStore:
    """A store with one file, which is not copied."""
    store = MemoryStore()
    store.contents[file] = data
    return store


def _dense(data: bytearray, array: StoredArray, offset: int, strides: Shape | None) -> memoryview:
    """The elements of an array in C order."""
    if strides is None or array.n_bytes == 0:
        return memoryview(data)[offset : offset + array.n_bytes]
    import numpy as np

    size = array.n_bytes // prod(array.shape)
    steps = (*(step * size for step in strides), 1)
    flat = np.frombuffer(data, np.uint8)[offset:]
    return memoryview(np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, (*array.shape, size), steps))).cast(
        "B"
    )


class _Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes, none at the end."""


def inflated(
    store: ReadStore, file: str, span: tuple[int, int], transforms: tuple[str, ...], *, limit: int
) -> bytearray:
    """What a transformed item holds.

    Args:
        span: its bytes in the file.
        limit: most bytes that may come out.

    Raises:
        CorruptError: not zstd, damaged, or more than ``limit`` bytes.
        TruncatedError: the last frame is not complete, or the file ends too early.
        UnsupportedError: a frame needs a larger window than a decoder must have, or a dictionary.
    """
    import zstandard

    source: _Readable = _Stored(store, file, *span)
    for _ in transforms:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        frames: Any = _Frames(source)
        source = decompressor.stream_reader(frames, read_size=_READ_BYTES, read_across_frames=True)
    data = bytearray()
    try:
        while piece := source.read(_READ_BYTES):
            data += piece
            if len(data) > limit:
                raise CorruptError(
                    f"the item inflates to more than {limit} bytes, which its tensor cannot need",
                    file=file,
                    span=span,
                    hint="do not trust this checkpoint; ask where it came from",
                )
    except zstandard.ZstdError as err:
        if "memory" in str(err) or "dictionary" in str(err).lower():
            raise UnsupportedError(
                f"the zstd stream cannot be read within {MAX_WINDOW_BYTES >> 20} MiB: {err}", file=file, span=span
            ) from err
        raise CorruptError(f"the zstd stream is damaged: {err}", file=file, span=span) from err
    return data


class _Stored:
    """Some bytes of a file, read from begin to end."""

    def __init__(self, store: ReadStore, file: str, start: int, stop: int) -> None:
        self._store = store
        self._file = file
        self._at = start
        self._stop = stop

    def read(self, size: int = -1, /) -> bytes:
        n = self._stop - self._at if size < 0 else min(size, self._stop - self._at)
        data = self._store.read(self._file, self._at, n)
        self._at += n
        return data


class _Frames:
    """Passes zstd frames on and makes sure that they end: the decoder takes a stream that was cut for a short one.

    Follows the lengths that the frames state (RFC 8878, 3.1): frame header, block headers, checksum.
    """

    def __init__(self, source: _Readable) -> None:
        self._source = source
        self._head = b""
        self._need = 4
        self._skip = 0
        self._next: Callable[[bytes], None] = self._after_magic
        self._has_checksum = False
        self._is_between = True

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        if not data and size and not (self._is_between and not self._head and not self._skip):
            raise TruncatedError("the zstd stream ends inside a frame", hint="copy the checkpoint again")
        self._follow(data)
        return data

    def _follow(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._skip:
                n = min(self._skip, len(data) - at)
                self._skip -= n
            else:
                n = min(self._need - len(self._head), len(data) - at)
                self._head += data[at : at + n]
                if len(self._head) == self._need:
                    head, self._head = self._head, b""
                    self._is_between = False
                    self._next(head)
            at += n

    def _expect(self, n_bytes: int, then: Callable[[bytes], None]) -> None:
        self._need = n_bytes
        self._next = then

    def _frame_ends(self, skip: int) -> None:
        self._skip = skip
        self._is_between = True
        self._expect(4, self._after_magic)

    def _after_magic(self, head: bytes) -> None:
        magic = int.from_bytes(head, "little")
        if magic == 0xFD2FB528:
            self._expect(1, self._after_descriptor)
        elif magic & 0xFFFFFFF0 == 0x184D2A50:
            self._expect(4, lambda size: self._frame_ends(int.from_bytes(size, "little")))
        else:
            raise CorruptError(f"{head.hex(' ')} is no begin of a zstd frame")

    def _after_descriptor(self, head: bytes) -> None:
        is_single = head[0] >> 5 & 1
        self._has_checksum = bool(head[0] >> 2 & 1)
        n_dictionary = (0, 1, 2, 4)[head[0] & 3]
        n_content = (is_single, 2, 4, 8)[head[0] >> 6]
        self._skip = (not is_single) + n_dictionary + n_content
        self._expect(3, self._after_block)

    def _after_block(self, head: bytes) -> None:
        block = int.from_bytes(head, "little")
        kind = block >> 1 & 3
        self._skip = 1 if kind == 1 else block >> 3
        if kind == 3:
            raise CorruptError("a zstd block is of the reserved kind")
        if block & 1:
            self._frame_ends(self._skip + 4 * self._has_checksum)
