"""DCP items after a stream transform: zstd frames around the torch zip.

On disk: a plain item is a torch zip; a transformed one is the same zip as one or more zstd frames.
``.metadata`` lists the transforms of every item (``transform_descriptors``) and the length of the
stored bytes; the length of the zip is not recorded. torch lists the transforms in the order of
applying them, so reading undoes them from the end of the list. (torch 2.13 begins at the start of
the list, which will matter when there is a second kind.)

There is no random access: an item is inflated completely. Its size is bounded by the tensor in
``.metadata``, and the window of a frame by the 8 MiB that every zstd decoder supports (torch's
level needs 2).

Source: torch 2.13 ``torch/distributed/checkpoint/{_extension,filesystem}.py``; RFC 8878 for the
    frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.torch.item import TorchItem
from core.formats.torch.tree import load_object
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.dcp.columns import DcpItem

ZIP_OVERHEAD_BYTES = 1 << 16
"""Maximum size of a torch zip of one tensor, minus the size of the tensor."""

MAX_WINDOW_BYTES = 8 << 20
_READ_BYTES = 1 << 18
_OBJECT_BYTES = 64 << 20
_OBJECT_RATIO = 100


@dataclass(frozen=True, slots=True)
class StreamItem:
    """The encoding of a transformed item, which begins at the offset of the array's extent.

    Args:
        transforms: descriptors, in torch's order.
        stored_bytes: length of the item in its file.
        dense_bytes: size of the array's elements.
        place: byte offset of the array in the inflated item, and its strides in elements (None for
            C order); None if the item is one tensor, whose pickle contains both.
        inflated_bytes: maximum size of the inflated item; 0 to derive it from ``dense_bytes``.
    """

    transforms: tuple[str, ...]
    stored_bytes: int
    dense_bytes: int
    place: tuple[int, Shape | None] | None = None
    inflated_bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return " of ".join("zstd" for _ in self.transforms)

    @property
    def unit_bytes(self) -> int:
        """Size of a unit in bytes; the complete array is one unit."""
        return max(self.dense_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Memory for decoding in bytes.

        It includes the inflated item, and thereby the unit if the array is contiguous in the item.
        """
        return self._limit + len(self.transforms) * (MAX_WINDOW_BYTES + _READ_BYTES)

    @property
    def _limit(self) -> int:
        """Maximum size of the inflated item in bytes."""
        return self.inflated_bytes or self.dense_bytes + ZIP_OVERHEAD_BYTES

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the elements of the array in C order.

        Raises:
            CorruptError: the item is not zstd, contains another tensor, or inflates to too many
                bytes.
            TruncatedError: the item or the file is truncated.
            UnsupportedError: the item contains an unsupported kind of tensor.
        """
        assert unit == 0, "the array is one unit"
        extent = array.extent
        span = (extent.offset, extent.offset + self.stored_bytes)
        # Errors refer to a position in the inflated item; the user needs that in the file.
        try:
            data = inflate_item(store, extent.file, span, self.transforms, limit=self._limit)
            if self.place is not None:
                offset, strides = self.place
            else:
                item_extent = Extent(extent.file, 0, item=TorchItem(len(data)))
                item = replace(array, extent=item_extent)
                location = item.locate(_memory_store(extent.file, data)).extent
                offset, strides = location.offset, location.strides
        except CheckpointingException as err:
            err.file, err.key, err.span = extent.file, array.name, span
            raise
        if strides is None or array.n_bytes == 0:
            return memoryview(data)[offset : offset + array.n_bytes]

        # A transposed tensor: view its elements as groups of bytes, and copy them in C order.
        import numpy as np

        itemsize = array.n_bytes // prod(array.shape)
        byte_strides = (*(stride * itemsize for stride in strides), 1)
        item_bytes = np.frombuffer(data, np.uint8)[offset:]
        elements = np.lib.stride_tricks.as_strided(
            item_bytes, (*array.shape, itemsize), byte_strides
        )
        return memoryview(np.ascontiguousarray(elements)).cast("B")


def read_inflated_object(
    store: ReadStore, item: DcpItem, transforms: tuple[str, ...], *, key: str
) -> tuple[object, Mapping[str, StoredArray]]:
    """Read a transformed object; return its value, and the arrays of the tensors inside it.

    Args:
        store: the checkpoint.
        item: position of the object.
        transforms: descriptors of its transforms, in torch's order.
        key: key of the object.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: the object cannot be read.
    """
    # The size of an object is not recorded, so the limit follows from its compressed size.
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

    # The tensors inside the object are in the inflated bytes; address them in the checkpoint.
    stream_arrays = {}
    for name, array in arrays.items():
        place = array.extent.offset, array.extent.strides
        encoding = StreamItem(transforms, item.n_bytes, array.n_bytes, place, len(data))
        extent = Extent(item.file, item.offset, encoding=encoding)
        stream_arrays[name] = replace(array, extent=extent)
    return value, stream_arrays


def _memory_store(file: str, data: bytearray) -> MemoryStore:
    """Return a store with one file, whose content is not copied."""
    store = MemoryStore()
    store.contents[file] = data
    return store


class _Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes; b"" at the end."""


def inflate_item(
    store: ReadStore, file: str, span: tuple[int, int], transforms: tuple[str, ...], *, limit: int
) -> bytearray:
    """Inflate a transformed item.

    Args:
        store, file: the checkpoint and the file in it.
        span: first byte of the item in the file and byte after its last.
        transforms: descriptors of the item's transforms.
        limit: maximum number of inflated bytes.

    Raises:
        CorruptError: the item is not zstd, is damaged, or inflates to more than ``limit`` bytes.
        TruncatedError: the last frame is incomplete, or the file is truncated.
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
        while block := source.read(_READ_BYTES):
            data += block
            if len(data) > limit:
                raise CorruptError(
                    f"the item decompresses to more than {limit:,} bytes, the limit for its "
                    "content",
                    file=file,
                    span=span,
                    hint="do not trust this checkpoint; find out who wrote it",
                )
    # zstandard has one error class; only its message distinguishes these cases.
    except zstandard.ZstdError as err:
        if "memory" in str(err) or "dictionary" in str(err).lower():
            raise UnsupportedError(
                f"the zstd stream cannot be read with {MAX_WINDOW_BYTES >> 20} MiB of memory: "
                f"{err}",
                file=file,
                span=span,
            ) from err
        raise CorruptError(f"the zstd stream is damaged: {err}", file=file, span=span) from err
    return data


class _StoredRange:
    """A range of bytes of a file, read from beginning to end."""

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
    """A source of zstd frames that raises an error if the last one is incomplete.

    The decoder does not report it: it treats a truncated stream as a short one. So this class
    follows the lengths in frame headers and block headers (RFC 8878, 3.1).
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
        """Follow the frames through the next bytes: collect headers, and skip everything else."""
        position = 0
        while position < len(data):
            # A header may be split between two reads.
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
        """Collect the next ``n_bytes`` bytes and call ``then`` with them."""
        self._need = n_bytes
        self._next = then

    def _end_frame(self, skip: int) -> None:
        """Skip the last ``skip`` bytes of a frame, and expect another frame."""
        self._skip = skip
        self._is_between = True
        self._expect(4, self._after_magic)

    def _after_magic(self, head: bytes) -> None:
        """Begin a zstd frame or a skippable frame, according to the magic number."""
        magic = int.from_bytes(head, "little")
        if magic == 0xFD2FB528:
            self._expect(1, self._after_descriptor)
        elif magic & 0xFFFFFFF0 == 0x184D2A50:
            self._expect(4, lambda size: self._end_frame(int.from_bytes(size, "little")))
        else:
            raise CorruptError(f"the bytes {head.hex(' ')} do not begin a zstd frame")

    def _after_descriptor(self, head: bytes) -> None:
        """Skip the rest of the frame header; the descriptor encodes its length."""
        # A single-segment frame has no window descriptor, but always a content size.
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
        # Type 1 is one byte, to be repeated; for it the size is that of the result.
        self._skip = 1 if kind == 1 else block >> 3
        if kind == 3:
            raise CorruptError("a zstd block has the reserved type")
        if block & 1:
            self._end_frame(self._skip + 4 * self._has_checksum)
