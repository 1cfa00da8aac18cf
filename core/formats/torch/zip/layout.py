"""The layout of a torch zip, byte by byte, before its data is known.

Byte by byte, as miniz writes it for ``torch.save``::

    local header    30 bytes: version, time, date, CRC and sizes all 0;
                    flags 0x808 (0x800 if the record is empty)
    name
    extra field     [1: size and 0, if size ≥ 2³²−1; header offset, if that is ≥ 2³²−1]
                    then "FB" and as many "Z" as bring the data to a multiple of 64
    data
    descriptor      "PK\\7\\8", CRC and two sizes of 4 bytes (of 8 with a ZIP64 field);
                    none if the record is empty
    ⋮
    central directory, its entries without "FB"
    ZIP64 end record and locator (always), end record

Hence every offset follows from the sizes alone, so that data may be written in any order, and its
CRC, which follows it in the file, later.

Source: torch 2.13 ``caffe2/serialize/inline_container.cc`` (``getPadding``) and
``third_party/miniz-3.0.2/miniz.c`` (``mz_zip_writer_add_mem_ex_v2``); compared byte by byte with
files that it wrote, in tests.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from core.catalog.file_image import Literal
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
from core.values import dataclass

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
        crcs = array("I", bytes(4 * len(self.names)))
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
    sizes, headers, data = array("Q"), array("Q"), array("Q")
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
