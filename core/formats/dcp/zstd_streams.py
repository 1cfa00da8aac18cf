"""DCP items that went through a stream transform: zstd frames around the torch zip.

On disk: where a plain item has ``archive/…`` zip bytes, a transformed one has those bytes as one or
more zstd frames. ``.metadata`` names the transforms of every item (``transform_descriptors``) and
the length of what is stored; how long the zip is stands nowhere. The transform that torch applied
last is named last, so reading undoes them from the end of the list to its begin (torch 2.13 goes
from the begin, which differs once two kinds exist).

There is no random access: an item is inflated completely. Its size is bounded by the tensor that
``.metadata`` states, and the window of a frame by the 8 MiB that every zstd decoder supports
(torch's level needs 2).

Source: torch 2.13 ``torch/distributed/checkpoint/{_extension,filesystem}.py``; RFC 8878 for the
    frames.
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
"""Maximum number of bytes that a torch zip of one tensor is longer than the tensor."""

MAX_WINDOW_BYTES = 8 << 20
_READ_BYTES = 1 << 18
_OBJECT_BYTES = 64 << 20
_OBJECT_RATIO = 100


@dataclass(frozen=True, slots=True)
class StreamItem:
    """The encoding of a transformed item; the array's extent gives the start of the stored bytes.

    Args:
        transforms: descriptors, in torch's order.
        stored_bytes: length of the item in its file.
        dense_bytes: size of the array as a dense one.
        place: byte offset of the array in the inflated item, and its strides in elements (None for
            C order); None if the item is one tensor, whose pickle states both.
        inflated_bytes: maximum size of the inflated item; 0 if it follows from ``dense_bytes``.
    """

    transforms: tuple[str, ...]
    stored_bytes: int
    dense_bytes: int
    place: tuple[int, Shape | None] | None = None
    inflated_bytes: int = 0

    @property
    def name(self) -> str:
        """Return the name of the encoding."""
        return " of ".join("zstd" for _ in self.transforms)

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit: the whole array."""
        return max(self.dense_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Return the memory for decoding.

        It holds the inflated item, which also is the unit if the array is contiguous in it.
        """
        return self._limit + len(self.transforms) * (MAX_WINDOW_BYTES + _READ_BYTES)

    @property
    def _limit(self) -> int:
        return self.inflated_bytes or self.dense_bytes + ZIP_OVERHEAD_BYTES

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the dense bytes of the array.

        Raises:
            CorruptError: it is not such a stream, holds another tensor, or too many bytes.
            TruncatedError: the item, or the file, ends too early.
            UnsupportedError: the item holds a tensor of an unsupported kind.
        """
        extent = array.extent
        assert unit == 0
        span = (extent.offset, extent.offset + self.stored_bytes)
        try:
            data = inflate_item(store, extent.file, span, self.transforms, limit=self._limit)
            place = self.place
            if place is None:
                item_extent = Extent(extent.file, 0, item_bytes=len(data))
                location = item_location(
                    _memory_store(extent.file, data), replace(array, extent=item_extent)
                ).extent
                assert location is not None
                place = location.offset, location.strides
        except CheckpointingException as err:
            err.file, err.key, err.span = extent.file, array.name, span
            raise
        return _dense_elements(data, array, *place)


def read_inflated_object(
    store: ReadStore, item: DcpItem, transforms: tuple[str, ...], *, key: str
) -> tuple[object, Mapping[str, StoredArray]]:
    """Read a transformed object; return its value, and the arrays of the tensors in it.

    Args:
        item: position of the object.
        key: key of the object.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: the object cannot be read.
    """
    span = (item.offset, item.offset + item.n_bytes)
    try:
        data = inflate_item(
            store, item.file, span, transforms, limit=_OBJECT_BYTES + _OBJECT_RATIO * item.n_bytes
        )
        stream = StoredArray(key, "uint8", (len(data),), Extent(item.file, 0))
        value, arrays = load_object(_memory_store(item.file, data), stream, key=key)
    except CheckpointingException as err:
        err.file, err.key, err.span = item.file, key, span
        raise
    return value, {
        name: _as_stream_item(array, item, transforms, len(data)) for name, array in arrays.items()
    }


def _as_stream_item(
    array: StoredArray, item: DcpItem, transforms: tuple[str, ...], inflated_bytes: int
) -> StoredArray:
    """Return an array inside an inflated object as an array of the checkpoint."""
    place = array.extent.offset, array.extent.strides
    encoding = StreamItem(transforms, item.n_bytes, array.n_bytes, place, inflated_bytes)
    return replace(array, extent=Extent(item.file, item.offset, encoding=encoding))


def _memory_store(file: str, data: bytearray) -> MemoryStore:
    """Return a store with one file, whose content is not copied."""
    store = MemoryStore()
    store.contents[file] = data
    return store


def _dense_elements(
    data: bytearray, array: StoredArray, offset: int, strides: Shape | None
) -> memoryview:
    """Return the elements of an array in C order."""
    if strides is None or array.n_bytes == 0:
        return memoryview(data)[offset : offset + array.n_bytes]
    import numpy as np

    size = array.n_bytes // prod(array.shape)
    steps = (*(step * size for step in strides), 1)
    flat = np.frombuffer(data, np.uint8)[offset:]
    return memoryview(
        np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, (*array.shape, size), steps))
    ).cast("B")


class _Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes, none at the end."""


def inflate_item(
    store: ReadStore, file: str, span: tuple[int, int], transforms: tuple[str, ...], *, limit: int
) -> bytearray:
    """Inflate a transformed item.

    Args:
        span: first byte of the item in the file and byte after its last.
        limit: maximum number of inflated bytes.

    Raises:
        CorruptError: the item is not zstd, is damaged, or inflates to more than ``limit`` bytes.
        TruncatedError: the last frame is incomplete, or the file ends too early.
        UnsupportedError: a frame needs a dictionary, or a larger window than decoders must support.
    """
    import zstandard

    # Chain a decompressor for each transform.
    source: _Readable = _StoredRange(store, file, *span)
    for _ in transforms:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        frames: Any = _FrameFollower(source)
        source = decompressor.stream_reader(frames, read_size=_READ_BYTES, read_across_frames=True)
    # Inflate with a limit: a few bytes of zstd can stand for gigabytes.
    data = bytearray()
    try:
        while piece := source.read(_READ_BYTES):
            data += piece
            if len(data) > limit:
                raise CorruptError(
                    f"the item inflates to more than {limit:,} bytes, more than its tensor can need",
                    file=file,
                    span=span,
                    hint="do not trust this checkpoint; ask where it came from",
                )
    except zstandard.ZstdError as err:
        if "memory" in str(err) or "dictionary" in str(err).lower():
            raise UnsupportedError(
                f"the zstd stream cannot be read within {MAX_WINDOW_BYTES >> 20} MiB: {err}",
                file=file,
                span=span,
            ) from err
        raise CorruptError(f"the zstd stream is damaged: {err}", file=file, span=span) from err
    return data


class _StoredRange:
    """A range of bytes of a file, read from begin to end."""

    def __init__(self, store: ReadStore, file: str, start: int, stop: int) -> None:
        self._store = store
        self._file = file
        self._at = start
        self._stop = stop

    def read(self, size: int = -1, /) -> bytes:
        n_bytes = self._stop - self._at if size < 0 else min(size, self._stop - self._at)
        data = self._store.read(self._file, self._at, n_bytes)
        self._at += n_bytes
        return data


class _FrameFollower:
    """Passes zstd frames on and checks that they are complete.

    The decoder takes a truncated stream for a short one.

    Follows the lengths that the frames state (RFC 8878, 3.1): frame header, block headers,
    checksum.
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
            raise TruncatedError(
                "the zstd stream ends inside a frame", hint="copy the checkpoint again"
            )
        self._follow(data)
        return data

    def _follow(self, data: bytes) -> None:
        """Follow the frames through some bytes: skip what is in them, and collect headers."""
        position = 0
        while position < len(data):
            if self._skip:
                n_bytes = min(self._skip, len(data) - position)
                self._skip -= n_bytes
            else:
                n_bytes = min(self._need - len(self._head), len(data) - position)
                self._head += data[position : position + n_bytes]
                if len(self._head) == self._need:
                    head, self._head = self._head, b""
                    self._is_between = False
                    self._next(head)
            position += n_bytes

    def _expect(self, n_bytes: int, then: Callable[[bytes], None]) -> None:
        """Collect the next ``n_bytes`` bytes, and call a function with them."""
        self._need = n_bytes
        self._next = then

    def _frame_ends(self, skip: int) -> None:
        """Skip the rest of a frame; the next bytes are a magic number."""
        self._skip = skip
        self._is_between = True
        self._expect(4, self._after_magic)

    def _after_magic(self, head: bytes) -> None:
        """Begin a frame, or a skippable one."""
        magic = int.from_bytes(head, "little")
        if magic == 0xFD2FB528:
            self._expect(1, self._after_descriptor)
        elif magic & 0xFFFFFFF0 == 0x184D2A50:
            self._expect(4, lambda size: self._frame_ends(int.from_bytes(size, "little")))
        else:
            raise CorruptError(f"{head.hex(' ')} is not the beginning of a zstd frame")

    def _after_descriptor(self, head: bytes) -> None:
        """Skip the rest of the frame header, whose length the descriptor states."""
        is_single = head[0] >> 5 & 1
        self._has_checksum = bool(head[0] >> 2 & 1)
        n_dictionary = (0, 1, 2, 4)[head[0] & 3]
        n_content = (is_single, 2, 4, 8)[head[0] >> 6]
        self._skip = (not is_single) + n_dictionary + n_content
        self._expect(3, self._after_block)

    def _after_block(self, head: bytes) -> None:
        """Skip a block; the last one ends the frame."""
        block = int.from_bytes(head, "little")
        kind = block >> 1 & 3
        self._skip = 1 if kind == 1 else block >> 3
        if kind == 3:
            raise CorruptError("a zstd block has the reserved type")
        if block & 1:
            self._frame_ends(self._skip + 4 * self._has_checksum)
