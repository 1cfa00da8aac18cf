"""Where the data of a DCP item lies: an item is a torch zip of one bare tensor, embedded in a bigger file.

``.metadata`` states offset and length of the item, dtype and shape of the tensor; the byte address and the strides
stand inside the item. Torch writes items at any offset, and a tensor that was transposed or channels-last when it was
saved keeps those strides, so both must be read. The CRC of the data stands behind them, in the record's descriptor.

This is asked for every one of 10⁵ items, at copy time, from several threads. So two small reads must do: the bytes in
front of the data (the pickle and headers), and those behind them (descriptors and the zip's directory). Items of equal
dtype, shape and strides have both in common, but for the CRCs; where that is so, what was found for one whose zip was
checked serves for all. An item that the real reader would refuse, because its zip is cut short or its directory is
damaged, looks different, and is refused.

Source: torch 2.13 ``torch/distributed/checkpoint/filesystem.py``; items that it and megatron-core wrote, in
tests/golden.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from struct import Struct
from typing import TYPE_CHECKING

from core.arrays.box import Shape, c_strides
from core.arrays.dtypes import itemsize
from core.catalog.catalog import swapped
from core.catalog.stored import StoredArray
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.formats.torch.tensors import Location, TensorReader, unsupported_kind
from core.formats.torch.zip.container import CENTRAL, Archive, check_kind, read_archive
from core.formats.torch.zip.records import read_record, refuse_encoded
from core.pickle.inert import TensorLeaf
from core.pickle.reader import judge, load, noting_uses

if TYPE_CHECKING:
    from core.files.store import ReadStore

HEAD_BYTES = 2048
DESCRIPTOR_SIGNATURE = 0x08074B50
DESCRIPTOR_SIGNATURE_BYTES = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")
DESCRIPTOR64 = Struct("<IIQQ")
"""Signature, CRC, the two sizes. Torch writes this one; others write the short one where sizes allow."""
DESCRIPTOR32 = Struct("<IIII")
U32_FIELD = Struct("<I")
_CRC_IN_CENTRAL = 16
_CONTENT_ID = ".data/serialization_id"
"""The record that torch writes last, a hash of the others' CRCs."""
_MAX_TAIL_BYTES = 1 << 16
_MAX_FORMS = 1024


@dataclass(frozen=True, slots=True)
class _Form:
    """What items of one kind look like.

    Args:
        location: the tensor.
        data_offset: byte of the item at which the tensor's record begins.
        tail_offset: byte of the item behind that record.
        tail: the bytes from there on as a number, without those that differ from item to item; 0 if not known.
        mask: of the bytes that do not differ.
        crc_at: byte behind ``tail_offset`` at which the directory states the CRC of the record.
    """

    location: Location
    data_offset: int
    tail_offset: int = 0
    tail: int = 0
    mask: int = 0
    crc_at: int = 0


class _Forms(threading.local):
    """The kinds of items that a thread has seen.

    Attributes:
        known: bytes up to the tensor's data, and length of the item → what the rest looks like.
        lengths: of those bytes, the most recent first.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[bytes, int], _Form] = {}
        self.lengths: list[int] = []


_forms = _Forms()


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
    if extent.item_bytes is None:
        return array
    start, n_bytes = extent.offset, extent.item_bytes
    try:
        form, crc = _located(store, extent.file, start, n_bytes)
        offset, found = form.data_offset, form.location
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
    if extent.part_of is not None or strides is not None or found.storage_bytes != array.n_bytes:
        crc = None
    if extent.is_swapped:
        strides = swapped(strides or c_strides(own_shape))
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
    assert extent.item_bytes is not None, "an item"
    found = _located(store, extent.file, extent.offset, extent.item_bytes)[0].location
    return found.dtype, found.shape


def _located(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[_Form, int | None]:
    """Return what an item looks like, and the CRC-32 that it states of the tensor's record; None if not computed.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: see ``item_location``.
    """
    head = store.read(file, start, min(HEAD_BYTES, n_bytes))
    for length in _forms.lengths:
        form = _forms.known.get((head[:length], n_bytes))
        if form is not None:
            tail = store.read(file, start + form.tail_offset, n_bytes - form.tail_offset)
            if int.from_bytes(tail, "little") & form.mask == form.tail:
                return form, U32_FIELD.unpack_from(tail, form.crc_at)[0] or None
    form, crc = _by_directory(store, file, start, n_bytes)
    if form.tail and form.data_offset <= len(head):
        if len(_forms.known) >= _MAX_FORMS:
            _forms.known.clear()
            _forms.lengths.clear()
        _forms.known[head[: form.data_offset], n_bytes] = form
        if form.data_offset not in _forms.lengths:
            _forms.lengths.insert(0, form.data_offset)
    return form, crc


def _by_directory(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[_Form, int | None]:
    """Return the same as ``_located``, from the zip's directory: slower, and the authority about what is wrong."""
    archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    check_kind(archive)
    pickle = archive.record("data.pkl")
    refuse_encoded(store, archive, pickle)
    location = _tensor(read_record(store, file, pickle), file)
    record = archive.record(location.record)
    refuse_encoded(store, archive, record)
    if location.storage_bytes > record.n_bytes:
        raise CorruptError(
            f"the tensor's storage has {location.storage_bytes} bytes, its record only {record.n_bytes}", file=file
        )
    return _form(store, archive, location), record.crc or None


def _form(store: ReadStore, archive: Archive, location: Location) -> _Form:
    """Return what items have in common with one whose zip has been checked."""
    record = archive.records[location.record]
    start, stop = archive.span
    begin = record.span[1]
    if stop - begin > _MAX_TAIL_BYTES:
        return _Form(location, record.offset - start)
    tail = store.read(archive.file, begin, stop - begin)
    mask = bytearray(b"\xff" * len(tail))

    def differs(address: int, n_bytes: int) -> None:
        mask[address - begin : address - begin + n_bytes] = bytes(n_bytes)

    # Behind a record stands its descriptor, with the CRC behind the signature.
    varying = {location.record: record}
    if _CONTENT_ID in archive.records and archive.records[_CONTENT_ID].offset >= begin:
        varying[_CONTENT_ID] = archive.records[_CONTENT_ID]
        differs(archive.records[_CONTENT_ID].offset, archive.records[_CONTENT_ID].n_bytes)
    for other in varying.values():
        if tail[other.span[1] - begin :].startswith(DESCRIPTOR_SIGNATURE_BYTES):
            differs(other.span[1] + 4, U32_FIELD.size)

    # The directory states every CRC again.
    names = {f"{archive.root}/{name}".encode("utf-8", "surrogatepass"): name for name in varying}
    at, crc_at = archive.directory - begin, None
    while tail[at : at + 4] == b"PK\x01\x02":
        fields = CENTRAL.unpack_from(tail, at)
        name = names.get(tail[at + CENTRAL.size : at + CENTRAL.size + fields[10]])
        if name is not None:
            differs(begin + at + _CRC_IN_CENTRAL, U32_FIELD.size)
        if name == location.record:
            crc_at = at + _CRC_IN_CENTRAL
        at += CENTRAL.size + fields[10] + fields[11] + fields[12]
    if crc_at is None:
        return _Form(location, record.offset - start)
    bits = int.from_bytes(mask, "little")
    return _Form(location, record.offset - start, begin - start, int.from_bytes(tail, "little") & bits, bits, crc_at)


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
