"""Where the data of a DCP item lies: an item is a torch zip of one bare tensor, embedded in a bigger file.

``.metadata`` states offset and length of the item, dtype and shape of the tensor; the byte address and the strides
stand inside the item. Torch writes items at any offset, and a tensor that was transposed or channels-last when it was
saved keeps those strides, so both must be read. The CRC of the data stands behind them, in the record's descriptor.

This is asked for every one of 10⁵ items, at copy time, from several threads. So one read of the item's first bytes must
do: they hold the pickle and the headers up to the data. Items of equal dtype, shape and strides begin with the same
bytes, and what was found for one serves for all. Where the first bytes are not laid out as torch does it, the zip's
directory decides.

Source: torch 2.13 ``torch/distributed/checkpoint/filesystem.py``; items that it and megatron-core wrote, in
tests/golden.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from struct import Struct
from typing import TYPE_CHECKING

from core.box import Shape, c_strides
from core.catalog import StoredArray, swapped
from core.dtypes import itemsize
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.formats.torch_record import refuse_encoded
from core.formats.torch_tensor import Location, TensorReader, unsupported_kind
from core.formats.torch_zip import HAS_DESCRIPTOR, LOCAL, LOCAL_SIGNATURE, U32, Archive, check_kind, read_archive
from core.inert import TensorLeaf
from core.safe_pickle import judge, load, noting_uses

if TYPE_CHECKING:
    from core.store import ReadStore

HEAD_BYTES = 2048
DESCRIPTOR_SIGNATURE = 0x08074B50
DESCRIPTOR64 = Struct("<IIQQ")
"""Signature, CRC, the two sizes. Torch writes this one; others write the short one where sizes allow."""
DESCRIPTOR32 = Struct("<IIII")
_MAX_HEADS = 1024


class _Heads(threading.local):
    """What a thread knows of the first bytes of items.

    Attributes:
        found: bytes up to the data → offset of the data in the item, and the tensor.
        lengths: of those keys, the most recent first.
    """

    def __init__(self) -> None:
        self.found: dict[bytes, tuple[int, Location]] = {}
        self.lengths: list[int] = []


_heads = _Heads()


def item_location(store: ReadStore, array: StoredArray) -> StoredArray:
    """The array with its real byte address and strides, for one whose extent is a DCP item.

    Args:
        array: late-bound; any other array is returned as it is.

    Raises:
        CorruptError: the item is damaged, or holds another dtype or shape than ``array`` has.
        TruncatedError: the file ends too early.
        UnsupportedError: the item holds a tensor that is not handled.
    """
    extent = array.extent
    if extent is None or extent.item_bytes is None:
        return array
    start, n_bytes = extent.offset, extent.item_bytes
    try:
        offset, found = _located(store, extent.file, start, n_bytes)
        own_shape = swapped(array.shape) if extent.is_swapped else array.shape
        shape, before = extent.part_of or (own_shape, 0)
        if found.dtype != array.dtype or found.shape != shape:
            raise CorruptError(
                f"the item holds a {found.dtype} tensor of shape {found.shape}, the metadata says {array.dtype} and "
                f"{shape}"
            )
        if extent.part_of is not None and found.strides not in (None, c_strides(shape)):
            raise UnsupportedError("only a part of the item's tensor is needed, but it is not dense")
        if offset + found.storage_bytes > n_bytes:
            raise CorruptError(f"the item has {n_bytes} bytes, too few for its storage of {found.storage_bytes} bytes")
    except CheckpointingException as err:
        err.file = err.file or extent.file
        err.key = err.key or array.name
        err.span = err.span or (start, start + n_bytes)
        raise
    address = start + offset + found.offset + before * itemsize(array.dtype)
    strides = found.strides if extent.part_of is None else None
    crc = None
    if extent.is_swapped:
        strides = swapped(strides or c_strides(own_shape))
    elif extent.part_of is None and strides is None and found.storage_bytes == array.n_bytes:
        crc = _stated_crc(store, extent.file, address + array.n_bytes, start + n_bytes, array.n_bytes)
    return replace(
        array,
        extent=replace(
            extent, offset=address, strides=strides, item_bytes=None, part_of=None, is_swapped=False, crc=crc
        ),
    )


def stored_tensor(store: ReadStore, array: StoredArray) -> tuple[str, Shape]:
    """dtype and shape of the tensor in the item of a late-bound array, whatever the metadata says.

    Raises:
        CorruptError, TruncatedError, UnsupportedError: as ``item_location``.
    """
    extent = array.extent
    assert extent is not None and extent.item_bytes is not None, "an item"
    found = _located(store, extent.file, extent.offset, extent.item_bytes)[1]
    return found.dtype, found.shape


def _stated_crc(store: ReadStore, file: str, at: int, end: int, n_bytes: int) -> int | None:
    """The CRC-32 in the descriptor that follows a record; None where there is none, or it was not computed.

    Args:
        at: byte of the file behind the record.
        end: of the item.
        n_bytes: of the record; the descriptor states it, too.
    """
    data = store.read(file, at, max(0, min(DESCRIPTOR64.size, end - at)))
    for layout in (DESCRIPTOR64, DESCRIPTOR32):
        if len(data) >= layout.size:
            mark, crc, stored, size = layout.unpack_from(data)
            if mark == DESCRIPTOR_SIGNATURE and stored == size == n_bytes:
                return crc or None
    return None


def _located(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[int, Location]:
    """Offset of the tensor's record in the item, and the tensor."""
    head = store.read(file, start, min(HEAD_BYTES, n_bytes))
    for length in _heads.lengths:
        known = _heads.found.get(head[:length])
        if known is not None:
            return known
    scanned = _scanned(head, file)
    if scanned is None:
        return _by_directory(store, file, start, n_bytes)
    if len(_heads.found) >= _MAX_HEADS:
        _heads.found.clear()
        _heads.lengths.clear()
    _heads.found[head[: scanned[0]]] = scanned
    if scanned[0] not in _heads.lengths:
        _heads.lengths.insert(0, scanned[0])
    return scanned


def _scanned(head: bytes, file: str) -> tuple[int, Location] | None:
    """The same from the first bytes of an item, or None if they are not what torch writes or not enough.

    Walks the local headers. Only a record with a descriptor has a length there that must be searched for: the pickle
    ends where a descriptor that states its length follows.
    """
    at = 0
    found: Location | None = None
    while at + LOCAL.size <= len(head):
        mark, _, flags, method, _, _, _, _, size, n_name, n_extra = LOCAL.unpack_from(head, at)
        if mark != LOCAL_SIGNATURE or method or flags & ~0x0800 & ~HAS_DESCRIPTOR or size:
            return None
        name = head[at + LOCAL.size : at + LOCAL.size + n_name]
        data = at + LOCAL.size + n_name + n_extra
        record = name.partition(b"/")[2]
        if found is not None and record == found.record.encode("utf-8", "surrogatepass"):
            return (data, found) if data <= len(head) else None
        end = _end_of_record(head, data) if flags & HAS_DESCRIPTOR else data
        if end is None:
            return None
        if record == b"data.pkl":
            if found is not None:
                return None
            found = _tensor(head[data:end], file)
        elif record == b"byteorder" and head[data:end] != b"little":
            return None
        at = end + (16 if flags & HAS_DESCRIPTOR else 0)
    return None


def _end_of_record(head: bytes, data: int) -> int | None:
    """Where a record of unknown length ends: before the first descriptor that states just that length."""
    end = head.find(b"PK\x07\x08", data)
    while end >= 0:
        if end + 16 > len(head):
            return None
        size = int.from_bytes(head[end + 12 : end + 16], "little")
        if size == end - data and size == int.from_bytes(head[end + 8 : end + 12], "little") and size < U32:
            return end
        end = head.find(b"PK\x07\x08", end + 1)
    return None


def _by_directory(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[int, Location]:
    """The same from the zip's directory: slower, and the authority about what is wrong."""
    archive: Archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    check_kind(archive)
    pickle = archive.record("data.pkl")
    refuse_encoded(store, archive, pickle)
    found = _tensor(store.read(file, pickle.offset, pickle.n_bytes), file)
    record = archive.record(found.record)
    refuse_encoded(store, archive, record)
    if found.storage_bytes > record.n_bytes:
        raise CorruptError(
            f"the tensor's storage has {found.storage_bytes} bytes, its record only {record.n_bytes}", file=file
        )
    return record.offset - start, found


def _tensor(pickle: bytes, file: str) -> Location:
    """The tensor that is all of a pickle."""
    reader = TensorReader()
    with noting_uses() as uses:
        value = load(pickle, label=file, hooks=reader.hooks)
    dangerous = next((use for use in uses if use.stream is not None or judge(use) == "dangerous"), None)
    if dangerous is not None:
        raise UnsafeError(
            f"the item names {dangerous.name}, which would run code when it is loaded",
            file=file,
            hint="do not load it with anything else, and find out who wrote this checkpoint",
        )
    if isinstance(value, TensorLeaf):
        return reader.locations[value.key]
    kind = unsupported_kind(value)
    if kind is not None:
        raise UnsupportedError(f"the item holds a {kind}", hint="load the checkpoint with torch and save plain tensors")
    raise CorruptError(f"the item holds a {type(value).__name__} where a tensor should be")
