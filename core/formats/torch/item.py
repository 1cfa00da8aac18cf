"""The data of a DCP item: a torch zip of one bare tensor, embedded in a bigger file.

``.metadata`` records offset and length of the item, dtype and shape of the tensor; the byte address
and the strides are recorded in the item. Torch writes items at any offset, and a tensor that was
transposed or channels-last when it was saved keeps those strides, so both must be read. The CRC of
the data follows them, in the record's descriptor.

This is done for every one of 10⁵ items, at copy time, in several threads. So two small reads have
to suffice: the bytes before the data (pickle and headers), and those after them (descriptors and
the zip's directory). Both are equal for items of equal dtype, shape and strides, except for the
CRCs. So one such item is parsed and checked, and the others are compared with it. An item that the
parser would refuse, because its zip is cut short or its directory is damaged, differs from it; it
is then parsed, and refused.

Source: torch 2.13 ``torch/distributed/checkpoint/filesystem.py``; items that it and megatron-core
wrote, in tests/golden.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

from core.arrays.box import Shape, c_strides
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import StoredArray, strides_with_axes, without_axes
from core.errors import (
    UNLIKE_ANY_WRITER,
    CheckpointingException,
    CorruptError,
    UnsafeError,
    UnsupportedError,
    suggesting,
)
from core.formats.torch.tensors import Location, TensorHooks, unsupported_kind
from core.formats.torch.zip.container import CENTRAL, Archive, check_kind, read_archive
from core.formats.torch.zip.records import read_record, refuse_encoded
from core.pickle.inert import TensorLeaf
from core.pickle.names import judge
from core.pickle.noted import noting_uses
from core.pickle.reader import load
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

HEAD_BYTES = 2048
"""Bytes read at the beginning of an item; torch's pickle and headers of a tensor are shorter."""
DESCRIPTOR_SIGNATURE = 0x08074B50
DESCRIPTOR_SIGNATURE_BYTES = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")
DESCRIPTOR64 = Struct("<IIQQ")
"""Signature, CRC and two sizes, as torch writes them."""
DESCRIPTOR32 = Struct("<IIII")
"""The same as other programs write it if the sizes fit."""
U32_FIELD = Struct("<I")
_CRC_IN_CENTRAL = 16
"""Offset of the CRC in an entry of the directory."""
_CONTENT_ID = ".data/serialization_id"
"""The record that torch writes last, a hash of the others' CRCs."""
_MAX_TAIL_BYTES = 1 << 16
_MAX_FORMS = 1024


@dataclass(frozen=True, slots=True)
class _ItemForm:
    """The bytes that items with equal dtype, shape and strides have in common.

    Args:
        location: the tensor's location.
        data_offset: byte of the item at which the tensor's record begins.
        tail_offset: byte of the item after that record.
        tail: the bytes from there on as a number, 0 where they differ from item to item; 0 if this
            form cannot be compared with other items.
        mask: a number with ones in the bytes that do not differ.
        crc_at: offset of the record's CRC in the directory, relative to ``tail_offset``.
    """

    location: Location
    data_offset: int
    tail_offset: int = 0
    tail: int = 0
    mask: int = 0
    crc_at: int = 0


class _ThreadForms(threading.local):
    """The forms of items that a thread has parsed.

    Attributes:
        forms: (bytes before the tensor's data, length of the item) → form.
        lengths: distinct numbers of bytes before the data, the most recent first.
    """

    def __init__(self) -> None:
        self.forms: dict[tuple[bytes, int], _ItemForm] = {}
        self.lengths: list[int] = []


_thread_forms = _ThreadForms()


@dataclass(frozen=True, slots=True)
class TorchItem:
    """A torch zip of one tensor (``ContainerItem``).

    Args:
        n_bytes: length of the zip.
    """

    n_bytes: int

    def locate(self, store: ReadStore, array: StoredArray) -> StoredArray:
        """Return the array with its byte address and strides (``find_in_item``)."""
        return find_in_item(store, array, self.n_bytes)


@lru_cache(maxsize=4096)
def torch_item(n_bytes: int) -> TorchItem:
    """Return the item of a length; 10⁵ chunks have a few different ones."""
    return TorchItem(n_bytes)


def find_in_item(store: ReadStore, array: StoredArray, n_bytes: int) -> StoredArray:
    """Return a DCP item's array with its real byte address and strides.

    Args:
        array: an array whose extent is an item.
        n_bytes: length of the item.

    Raises:
        CorruptError: the item is damaged, or its tensor differs from ``array`` in dtype or shape.
        TruncatedError: the file ends too early.
        UnsupportedError: the item holds a tensor of a kind that is not supported, a compressed or
            big-endian one, or one with strides of which only a part is needed.
        UnsafeError: the pickle would run code when it is loaded.
    """
    extent, start = array.extent, array.extent.offset
    try:
        form, crc = _find_form(store, extent.file, start, n_bytes)
        # The array may have the item's axes in another order, or be a run of its elements.
        stored_shape = without_axes(array).shape
        shape, n_before = extent.part_of or (stored_shape, 0)
        _check_tensor(form, array, shape, n_bytes)
    except CheckpointingException as err:
        err.file = err.file or extent.file
        err.key = err.key or array.name
        err.span = err.span or (start, start + n_bytes)
        raise
    # Turn the position in the item into an address in the file.
    location = form.location
    address = start + form.data_offset + location.offset + n_before * itemsize(array.dtype)
    strides = location.strides if extent.part_of is None else None
    # The CRC is that of the entire record, so it is valid only for all of a dense tensor.
    if extent.part_of is not None or strides is not None or location.storage_bytes != array.n_bytes:
        crc = None
    if extent.axes is not None:
        strides = strides_with_axes(strides or c_strides(stored_shape), extent.axes)
    return replace(
        array,
        extent=replace(
            extent,
            offset=address,
            strides=strides,
            item=None,
            part_of=None,
            axes=None,
            crc=crc,
        ),
    )


@suggesting(UNLIKE_ANY_WRITER)
def _check_tensor(form: _ItemForm, array: StoredArray, shape: Shape, n_bytes: int) -> None:
    """Compare the tensor in an item with the metadata.

    Args:
        array: the array according to the metadata, whose extent is the item.
        shape: shape of the item's tensor according to the metadata.
        n_bytes: length of the item.

    Raises:
        CorruptError: dtype or shape differ, or the item is too short for its storage.
        UnsupportedError: only a part of the tensor is needed, but it has strides.
    """
    location = form.location
    if location.dtype != array.dtype or location.shape != shape:
        raise CorruptError(
            f"the item contains a {location.dtype} tensor of shape {location.shape}, but the "
            f"metadata specifies {array.dtype} and shape {shape}"
        )
    if array.extent.part_of is not None and location.strides not in (None, c_strides(shape)):
        raise UnsupportedError(
            "ckpt cannot read a part of the item's tensor, because the tensor is not contiguous"
        )
    if form.data_offset + location.storage_bytes > n_bytes:
        raise CorruptError(
            f"the item is {n_bytes} bytes long, too short for its storage of "
            f"{location.storage_bytes} bytes"
        )


def stored_tensor(store: ReadStore, array: StoredArray) -> tuple[str, Shape]:
    """Return dtype and shape of the tensor in a DCP item, ignoring those in the metadata.

    Raises:
        CorruptError, TruncatedError, UnsupportedError: as ``find_in_item``.
    """
    extent = array.extent
    assert extent.item is not None
    location = _find_form(store, extent.file, extent.offset, extent.item.n_bytes)[0].location
    return location.dtype, location.shape


@suggesting(UNLIKE_ANY_WRITER)
def _find_form(
    store: ReadStore, file: str, start: int, n_bytes: int
) -> tuple[_ItemForm, int | None]:
    """Return the form of an item, and the recorded CRC-32 of the tensor's record.

    The CRC is None if the writer did not compute it.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: see ``find_in_item``.
    """
    head = store.read(file, start, min(HEAD_BYTES, n_bytes))
    # Compare the item with the forms of earlier ones.
    for length in _thread_forms.lengths:
        form = _thread_forms.forms.get((head[:length], n_bytes))
        if form is not None:
            tail = store.read(file, start + form.tail_offset, n_bytes - form.tail_offset)
            if int.from_bytes(tail, "little") & form.mask == form.tail:
                return form, U32_FIELD.unpack_from(tail, form.crc_at)[0] or None
    # Otherwise parse it by its directory, which is slower, and finds what is wrong with an item.
    archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    check_kind(archive)
    pickle = archive.record("data.pkl")
    refuse_encoded(store, archive, pickle)
    location = _load_tensor(read_record(store, file, pickle), file)
    record = archive.record(location.record)
    refuse_encoded(store, archive, record)
    if location.storage_bytes > record.n_bytes:
        raise CorruptError(
            f"the tensor's storage should be {location.storage_bytes} bytes long, but its record "
            f"has only {record.n_bytes} bytes",
            file=file,
        )
    # Keep the form, so that other items can be compared with it.
    form = _build_form(store, archive, location)
    if form.tail and form.data_offset <= len(head):
        if len(_thread_forms.forms) >= _MAX_FORMS:
            _thread_forms.forms.clear()
            _thread_forms.lengths.clear()
        _thread_forms.forms[head[: form.data_offset], n_bytes] = form
        if form.data_offset not in _thread_forms.lengths:
            _thread_forms.lengths.insert(0, form.data_offset)
    return form, record.crc or None


def _build_form(store: ReadStore, archive: Archive, location: Location) -> _ItemForm:
    """Build the form of an item whose zip has been checked.

    Args:
        location: location of the item's tensor.
    """
    record = archive.records[location.record]
    start, stop = archive.span
    begin = record.span[1]
    if stop - begin > _MAX_TAIL_BYTES:
        return _ItemForm(location, record.offset - start)
    tail = store.read(archive.file, begin, stop - begin)
    # The mask is 0 where items may differ: CRCs, and torch's hash of them.
    mask = bytearray(b"\xff" * len(tail))

    def ignore(address: int, n_bytes: int) -> None:
        mask[address - begin : address - begin + n_bytes] = bytes(n_bytes)

    # A record is followed by its descriptor, with the CRC after the signature.
    varying = {location.record: record}
    if _CONTENT_ID in archive.records and archive.records[_CONTENT_ID].offset >= begin:
        varying[_CONTENT_ID] = archive.records[_CONTENT_ID]
        ignore(archive.records[_CONTENT_ID].offset, archive.records[_CONTENT_ID].n_bytes)
    for other in varying.values():
        if tail[other.span[1] - begin :].startswith(DESCRIPTOR_SIGNATURE_BYTES):
            ignore(other.span[1] + 4, U32_FIELD.size)

    # The directory repeats every CRC; that of the tensor's record will be read from there.
    names = {f"{archive.root}/{name}".encode("utf-8", "surrogatepass"): name for name in varying}
    at, crc_at = archive.directory - begin, None
    while tail[at : at + 4] == b"PK\x01\x02":
        fields = CENTRAL.unpack_from(tail, at)
        name = names.get(tail[at + CENTRAL.size : at + CENTRAL.size + fields[10]])
        if name is not None:
            ignore(begin + at + _CRC_IN_CENTRAL, U32_FIELD.size)
        if name == location.record:
            crc_at = at + _CRC_IN_CENTRAL
        # Name, extra field and comment follow an entry's fixed part.
        at += CENTRAL.size + fields[10] + fields[11] + fields[12]
    if crc_at is None:
        return _ItemForm(location, record.offset - start)
    bits = int.from_bytes(mask, "little")
    return _ItemForm(
        location,
        record.offset - start,
        begin - start,
        int.from_bytes(tail, "little") & bits,
        bits,
        crc_at,
    )


def _load_tensor(pickle: bytes, file: str) -> Location:
    """Return the location of the tensor that a pickle consists of.

    Raises:
        UnsafeError: the pickle would run code when it is loaded.
        UnsupportedError: it is a tensor of a kind that is not supported.
        CorruptError: it is not a tensor.
    """
    reader = TensorHooks()
    with noting_uses() as uses:
        value = load(pickle, label=file, hooks=reader.hooks)
    dangerous = next(
        (use for use in uses if use.stream is not None or judge(use) == "dangerous"), None
    )
    if dangerous is not None:
        raise UnsafeError(
            f"the item refers to {dangerous.name}, which would run code when the item is loaded",
            file=file,
            hint="do not load the checkpoint with any other program, and find out who wrote it",
        )
    if isinstance(value, TensorLeaf):
        return reader.locations[value.key]
    kind = unsupported_kind(value)
    if kind is not None:
        raise UnsupportedError(
            f"the item contains a {kind}, which is not supported",
            hint="load the checkpoint with torch and save plain tensors instead",
        )
    raise CorruptError(f"the item contains a {type(value).__name__} instead of a tensor")
