"""Layout of the torch zip for an inert tree: its pickle, and a record for every tensor in it.

The zip, byte by byte, as miniz writes it for ``torch.save``::

    local header    30 bytes: version, time, date, CRC and sizes all 0;
                    flags 0x808 (0x800 if the record is empty)
    name
    extra field     [1: size and 0, if size ≥ 2³²−1; header offset, if that is ≥ 2³²−1]
                    then "FB" and as many "Z" as bring the data to a multiple of 64
    data
    descriptor      "PK\7\\8", CRC and two sizes of 4 bytes (of 8 with a ZIP64 field);
                    none if the record is empty
    ⋮
    central directory, its entries without "FB"
    ZIP64 end record and locator (always), end record

Hence every offset follows from the sizes alone, so that data may be written in any order, and its
CRC, which follows it in the file, later.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py``
(``_reduce_ex_internal``), ``caffe2/serialize/inline_container.cc`` (``getPadding``) and
``third_party/miniz-3.0.2/miniz.c`` (``mz_zip_writer_add_mem_ex_v2``); compared byte by byte with
files that it wrote, in tests.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array as number_array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.arrays.checksum import crc32_combine, crc32_of_zeros
from core.arrays.dtypes import DTYPES, itemsize
from core.engine.catalog.file_image import CrcOf, FileImage, JoinedArray, Literal, PlacedArray
from core.errors import UnsupportedError
from core.formats.format import check_dtypes
from core.formats.torch.zip.container import (
    CENTRAL,
    END,
    END64,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCATOR64,
    U16,
    U32,
)
from core.pickle.inert import Global, Inert, Persistent, TensorLeaf
from core.pickle.noted import gc_paused
from core.pickle.writer import dumps
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import PlannedArray

ALIGNMENT = 64
_UTF8 = 0x0800
_JOINED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """The layout of a torch zip, computed by ``plan_archive``.

    Offsets are relative to the beginning of the zip.

    Args:
        size: bytes of the zip.
        root: name of the directory that all records are in.
        names: full names of the records, the root included, in file order.
        sizes: bytes of each record.
        headers: offset of each record's local header.
        data: offset of each record's data.
        directory: offset of the central directory.
        directory_bytes: length of the central directory.
    """

    size: int
    root: str
    names: Sequence[str]
    sizes: Sequence[int]
    headers: Sequence[int]
    data: Sequence[int]
    directory: int
    directory_bytes: int

    def literals(
        self, payloads: Mapping[str, bytes], crc_of: Callable[[str], int]
    ) -> Iterator[Literal]:
        """Yield all bytes of the zip except the data of records that others write.

        Args:
            payloads: record name (without the root) → bytes, for the records to yield.
            crc_of: returns the CRC-32 of any other record, by its name; called once per record,
                when the record's data has been written, and not for empty ones.

        Yields:
            Bytes with their offsets, which increase; the central directory is split into parts.
        """
        crcs = number_array("I", bytes(4 * len(self.names)))
        skip = len(self.root) + 1
        for number, name in enumerate(self.names):
            n_bytes, header = self.sizes[number], self.headers[number]
            payload = payloads.get(name[skip:])
            head = self._local_header(number)
            # A literal record is complete: header, data and descriptor.
            if payload is not None:
                assert len(payload) == n_bytes
                crcs[number] = zlib.crc32(payload)
                descriptor = self._descriptor(number, crcs[number])
                if n_bytes < _JOINED_BYTES:
                    yield header, head + payload + descriptor
                else:  # joining would copy it
                    yield header, head
                    yield self.data[number], payload
                    yield self.data[number] + n_bytes, descriptor
                continue
            yield header, head
            # The descriptor follows the data that others write.
            if n_bytes:
                crcs[number] = crc_of(name[skip:])
                yield self.data[number] + n_bytes, self._descriptor(number, crcs[number])
        yield from self._directory_literals(crcs)

    def _local_header(self, number: int) -> bytes:
        name = self.names[number].encode()
        n_bytes, header = self.sizes[number], self.headers[number]
        extra = _wide_field(n_bytes, header, of_header=True)
        # Pad the extra field so that the data is aligned; CRC and sizes are in the descriptor.
        padding = self.data[number] - header - LOCAL.size - len(name) - len(extra) - 4
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _UTF8 | (HAS_DESCRIPTOR if n_bytes else 0)
        return (
            LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
            + name
            + extra
        )

    def _descriptor(self, number: int, crc: int) -> bytes:
        n_bytes = self.sizes[number]
        if not n_bytes:
            return b""
        is_wide = _is_wide(n_bytes, self.headers[number])
        return struct.pack("<4sIQQ" if is_wide else "<4sIII", b"PK\x07\x08", crc, n_bytes, n_bytes)

    def _directory_literals(self, crcs: Sequence[int]) -> Iterator[Literal]:
        """Yield the central directory and the end records, in parts of about 64 KiB."""
        at, part = self.directory, bytearray()
        for number, name in enumerate(self.names):
            raw = name.encode()
            n_bytes, header = self.sizes[number], self.headers[number]
            extra = _wide_field(n_bytes, header, of_header=False)
            flags = _UTF8 | (HAS_DESCRIPTOR if n_bytes else 0)
            # Values that do not fit are 2³²−1 here, and are in the ZIP64 field.
            short, near = min(n_bytes, U32), min(header, U32)
            part += CENTRAL.pack(
                b"PK\x01\x02",
                0,
                0,
                flags,
                0,
                0,
                0,
                crcs[number],
                short,
                short,
                len(raw),
                len(extra),
                0,
                0,
                0,
                0,
                near,
            )
            part += raw + extra
            if len(part) >= _JOINED_BYTES:
                yield at, bytes(part)
                at, part = at + len(part), bytearray()
        # miniz always writes the ZIP64 records; 0x031E and 0x2D are the versions that it writes.
        n, n_bytes, offset = len(self.names), self.directory_bytes, self.directory
        part += END64.pack(
            b"PK\x06\x06", END64.size - 12, 0x031E, 0x2D, 0, 0, n, n, n_bytes, offset
        )
        part += LOCATOR64.pack(b"PK\x06\x07", 0, offset + n_bytes, 1)
        n = min(n, U16)
        part += END.pack(b"PK\x05\x06", 0, 0, n, n, min(n_bytes, U32), min(offset, U32), 0)
        yield at, bytes(part)


def plan_archive(prefix: str, records: Sequence[tuple[str, int]]) -> ArchivePlan:
    """Plan the layout of a torch zip.

    Args:
        prefix: the root directory; torch uses ``archive`` if it has no file name.
        records: names below the root and their bytes, in file order; names are unique.
    """
    names = [f"{prefix}/{name}" for name, _ in records]
    sizes, headers, data = number_array("Q"), number_array("Q"), number_array("Q")
    header = directory_bytes = 0
    for name, (_, n_bytes) in zip(names, records, strict=True):
        n_name = len(name.encode())
        # Data begins at the next multiple of 64 after the header, whose padding is at least "FB".
        earliest = (
            header + LOCAL.size + n_name + 4 + len(_wide_field(n_bytes, header, of_header=True))
        )
        data_offset = -(-earliest // ALIGNMENT) * ALIGNMENT
        sizes.append(n_bytes)
        headers.append(header)
        data.append(data_offset)
        directory_bytes += (
            CENTRAL.size + n_name + len(_wide_field(n_bytes, header, of_header=False))
        )
        # The next header follows the descriptor.
        descriptor_bytes = 24 if _is_wide(n_bytes, header) else 16
        header = data_offset + (n_bytes + descriptor_bytes if n_bytes else 0)
    size = header + directory_bytes + END64.size + LOCATOR64.size + END.size
    return ArchivePlan(size, prefix, names, sizes, headers, data, header, directory_bytes)


def _is_wide(n_bytes: int, header: int) -> bool:
    """Return whether a record needs a ZIP64 field, and hence a descriptor with sizes of 8 bytes."""
    return n_bytes >= U32 or header >= U32


def _wide_field(n_bytes: int, header: int, *, of_header: bool) -> bytes:
    """Return the ZIP64 extra field of a record, b"" if it needs none.

    Args:
        of_header: build the field of the local header, in which miniz leaves the second size 0.
    """
    content = b""
    if n_bytes >= U32:
        content += struct.pack("<QQ", n_bytes, 0 if of_header else n_bytes)
    if header >= U32:
        content += struct.pack("<Q", header)
    return struct.pack("<HH", 1, len(content)) + content if content else b""


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The layout of a torch zip, before its data is known.

    Args:
        arrays: the arrays in the storages, in file order.
        records: the storages, in file order.
        archive: the positions of the zip's records, relative to its beginning.
        pickle: the content of ``data.pkl``.
    """

    arrays: list[PlacedArray]
    records: list[PlannedArray | JoinedArray]
    archive: ArchivePlan
    pickle: bytes

    @property
    def size(self) -> int:
        """Bytes of the zip."""
        return self.archive.size

    def image(self, path: str) -> FileImage:
        """Return the layout of a file that is the zip."""
        return FileImage(path, self.size, self.arrays, self.literals)

    def literals(self, crc_of: CrcOf) -> Iterator[Literal]:
        """Yield all bytes of the zip except the arrays, by increasing offset.

        Args:
            crc_of: returns the CRC-32 of a written array, by its name.
        """

        def crc_of_record(name: str) -> int:
            record = self.records[int(name.removeprefix("data/"))]
            if isinstance(record, JoinedArray):
                return _combine_crcs(record, crc_of)
            return crc_of(record.name)

        # The serialization id is 40 digits that depend on the content. torch hashes the records'
        # names and CRCs; the CRCs are not known before the data, so pickle and sizes are hashed.
        digest = hashlib.sha256(self.pickle)
        for record in self.records:
            digest.update(record.n_bytes.to_bytes(8, "little"))
        serialization_id = b"%040d" % (int.from_bytes(digest.digest(), "little") % 10**40)
        payloads = {
            "data.pkl": self.pickle,
            ".format_version": b"1",
            ".storage_alignment": b"64",
            "byteorder": b"little",
            "version": b"3\n",
            ".data/serialization_id": serialization_id,
        }
        return self.archive.literals(payloads, crc_of_record)


def _combine_crcs(record: JoinedArray, crc_of: CrcOf) -> int:
    """Return the CRC-32 of a storage from those of its parts; 0 if checksums are disabled."""
    item_bytes = itemsize(record.dtype)
    crc = end = 0
    # All parts have CRC 0 only if none was computed.
    is_off = bool(record.parts)
    for first, array in record.parts:
        part_crc = crc_of(array.name)
        is_off = is_off and part_crc == 0
        # Gaps between parts are zeros.
        if first > end:
            gap_bytes = (first - end) * item_bytes
            crc = crc32_combine(crc, crc32_of_zeros(gap_bytes), gap_bytes)
        crc = crc32_combine(crc, part_crc, array.n_bytes)
        end = first + array.n_bytes // item_bytes
    # So are the elements after the last part.
    if end < record.n:
        gap_bytes = (record.n - end) * item_bytes
        crc = crc32_combine(crc, crc32_of_zeros(gap_bytes), gap_bytes)
    return 0 if is_off else crc


@dataclass(frozen=True, slots=True)
class _NewStorage:
    """A storage of the new file, given by its persistent id."""

    pid: tuple[object, ...]


def plan_tree(
    value: object, array_of: Callable[[str], PlannedArray | JoinedArray], *, prefix: str
) -> TreePlan:
    """Plan the torch zip of an inert tree.

    Args:
        value: the tree to save.
        array_of: returns the array for a leaf's key, with dtype and shape. Every array is stored
            once, in C order, even if several leaves have it; the parts of a joined one become
            consecutive in one storage.
        prefix: name of the directory inside the zip; torch uses ``archive`` when it writes to an
            open file that has no name.

    Raises:
        UnsupportedError: the tree refers to a storage in another file.
    """
    # Pickle the tree; every tensor becomes a call with the number of its storage.
    arrays: list[PlannedArray | JoinedArray] = []
    number_of: dict[str, int] = {}
    dtypes: dict[str, str] = {}

    def reduce(leaf: TensorLeaf) -> Inert:
        array = array_of(leaf.key)
        dtypes[leaf.key] = array.dtype
        number = number_of.setdefault(array.name, len(arrays))
        if number == len(arrays):
            arrays.append(array)
        return _rebuild_call(leaf, array, number)

    def persistent_id(node: object) -> object:
        if isinstance(node, Persistent):
            raise UnsupportedError(
                "the object refers to a storage in its source file, so it cannot be written to a "
                "new file"
            )
        return node.pid if isinstance(node, _NewStorage) else None

    with gc_paused():
        pickle = dumps(value, persistent_id=persistent_id, reducers={TensorLeaf: reduce})
    check_dtypes(dtypes, lambda dtype: dtype.is_in_torch, owner="torch")
    storage_bytes = tuple(array.n_bytes for array in arrays)
    archive = (
        _plan_records(prefix, len(pickle), storage_bytes)
        if storage_bytes
        else _plan_object(prefix, len(pickle))
    )
    return TreePlan(placed_records(archive, arrays), arrays, archive, pickle)


def _plan_records(prefix: str, pickle_bytes: int, storage_bytes: tuple[int, ...]) -> ArchivePlan:
    """Lay out the records in torch's order."""
    storages = [(f"data/{number}", n_bytes) for number, n_bytes in enumerate(storage_bytes)]
    return plan_archive(
        prefix, [("data.pkl", pickle_bytes), *_AFTER_PICKLE, *storages, *_AFTER_STORAGES]
    )


_plan_object = lru_cache(maxsize=1024)(partial(_plan_records, storage_bytes=()))
"""A checkpoint may have 10⁵ objects without tensors, in few sizes."""
_AFTER_PICKLE = ((".format_version", 1), (".storage_alignment", 2), ("byteorder", 6))
_AFTER_STORAGES = (("version", 2), (".data/serialization_id", 40))
"""Names and bytes of the other records; ``TreePlan.literals`` has their contents."""


def placed_records(
    archive: ArchivePlan, records: Sequence[PlannedArray | JoinedArray]
) -> list[PlacedArray]:
    """Return the arrays in an archive's storages with their offsets, in file order."""
    placed: list[PlacedArray] = []
    for number, array in enumerate(records):
        # Four records precede the storages, see ``plan_tree``.
        offset = archive.data[4 + number]
        if isinstance(array, JoinedArray):
            size = itemsize(array.dtype)
            placed += [PlacedArray(offset + first * size, part) for first, part in array.parts]
        else:
            placed.append(PlacedArray(offset, array))
    return placed


def _rebuild_call(leaf: TensorLeaf, array: PlannedArray | JoinedArray, number: int) -> Inert:
    """Return the call that rebuilds a tensor, as torch pickles it.

    Args:
        number: number of the tensor's storage, ``data/<number>``.
    """
    # torch refuses to load an integer tensor that requires grad.
    dtype = DTYPES[array.dtype]
    needs_grad = leaf.requires_grad and dtype.kind in ("float", "complex")
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    geometry = (0, array.shape, c_strides(array.shape), needs_grad and leaf.wrapper is None, hooks)
    if dtype.storage is not None:
        n_elements = array.n_bytes // dtype.itemsize
        storage = _NewStorage(
            ("storage", Global("torch", dtype.storage), str(number), "cpu", n_elements)
        )
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v2"), (storage, *geometry))
    else:
        # Element types without a storage class are stored as bytes, and rebuilt by v3. torch 2.13
        # fails to load such a tensor if it requires grad, even from a file that it wrote.
        geometry = (*geometry[:3], False, hooks)
        untyped = Global("torch.storage", "UntypedStorage")
        storage = _NewStorage(("storage", untyped, str(number), "cpu", array.n_bytes))
        arguments = (storage, *geometry, Global("torch", dtype.name))
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v3"), arguments)
    # A parameter wraps a tensor that does not require grad.
    if leaf.wrapper != "parameter":
        return tensor
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    return Inert(
        "reduce", Global("torch._utils", "_rebuild_parameter"), (tensor, needs_grad, hooks)
    )
