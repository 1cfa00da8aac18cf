"""The container of ``torch.save``: a zip of stored records below one directory.

On disk (all numbers little endian; ``torch.zip.tree_layout`` draws the headers byte by byte)::

    <root>/data.pkl              the pickle; tensors are persistent ids that name records
    <root>/.format_version       "1"      ┐ torch 2.7 and later
    <root>/.storage_alignment    "64"     ┘
    <root>/byteorder             "little"   torch 2.1 and later
    <root>/data/0 … data/N       the storages, raw, each beginning at a multiple of 64 bytes
    <root>/version               "3\\n"
    <root>/.data/serialization_id
    central directory · ZIP64 end record · ZIP64 locator · end record

Records may be in any order, and all but ``data.pkl`` may be absent. The zip may be at any offset in
a bigger file, as the items of a DCP checkpoint are.

A zip contains all metadata twice, and readers differ in which copy they use (Python's ``zipfile``
the last of two equal names, torch the first). So every contradiction is refused: equal names,
several roots, bytes before the first record, local headers that differ from the directory, records
that overlap or reach outside the zip. The CRCs are not checked here; 0 stands for "not computed"
(``torch.serialization.set_crc32_options(False)``).

torch stores its records; other programs that repack a file deflate them. Both are read
(``torch.zip.records`` inflates the deflated ones). Not supported, refused by name: other
compression methods, encrypted or patched entries, several disks.

Source: PKWARE APPNOTE 6.3.10; torch 2.13 ``caffe2/serialize/inline_container.cc``,
``third_party/miniz-3.0.2``; files written by torch 2.13, pinned in tests/golden.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from core.errors import (
    UNLIKE_ANY_WRITER,
    CapacityError,
    CorruptError,
    Report,
    TruncatedError,
    UnsupportedError,
    raising,
)
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

LOCAL_SIGNATURE = b"PK\x03\x04"
LOCAL = struct.Struct("<4sHHHHHIIIHH")
"""Signature, version, flags, method, time, date, CRC, two sizes, length of the name, length of the
extra field.
"""
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
"""Signature, two versions, flags, method, time, date, CRC, two sizes, three lengths, disk, two
attributes, offset.
"""
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR64 = struct.Struct("<4sIQI")
U16 = 0xFFFF
U32 = 0xFFFFFFFF

HAS_DESCRIPTOR = 0x0008
_ENCRYPTED = 0x0001
_PATCHED = 0x0020
_UTF8 = 0x0800
_MASKED = 0x2000
_SEARCHED_BYTES = 4096 + 16 * 4093
"""Bytes at the end of a file in which miniz looks for the end record: windows of 4096 bytes that
overlap by 3, until they cover a comment of the maximum length, 65,535 bytes.
"""
_MAX_DIRECTORY_BYTES = 1 << 31
STORED = 0
DEFLATED = 8
MAX_INFLATION = 1032
"""Maximum number of bytes to which a deflated byte can inflate (zlib's technical details)."""
_ALIGNMENT = 64
_MAX_FIELD = 32
"""Maximum number of bytes of an extra field beside the padding: its head and ZIP64 sizes."""
_READ_AHEAD = 8192
"""Local headers that are closer to each other than this many bytes are read together."""
_MAX_READ = 1 << 20
"""Maximum number of bytes of local headers that are read together."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a torch zip.

    Args:
        offset: byte address of its data in the file.
        n_bytes: length of its data, inflated if need be.
        crc: CRC-32 of its data according to the directory; 0 also means "not computed".
        packed_bytes: length of its deflated data in the file; None if the data is stored plainly.
    """

    offset: int
    n_bytes: int
    crc: int = 0
    packed_bytes: int | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte of its data in the file and of the byte after the last."""
        return self.offset, self.offset + (
            self.n_bytes if self.packed_bytes is None else self.packed_bytes
        )


@dataclass(frozen=True, slots=True)
class Archive:
    """The directory of a torch zip.

    Args:
        file: the file that holds it.
        start, n_bytes: the bytes of the file that are the zip.
        root: name of the directory that all records are in.
        records: record name below the root → record, in the order of the central directory.
        directory: address of the central directory in the file.
        headers: addresses of the records' local headers, in the same order.
        n_trailing: number of bytes after the end of the zip, which torch ignores.
    """

    file: str
    start: int
    n_bytes: int
    root: str
    records: dict[str, Record]
    directory: int = 0
    headers: tuple[int, ...] = ()
    n_trailing: int = 0

    def record(self, name: str) -> Record:
        """Return the record with this name.

        Raises:
            CorruptError: the zip has no such record.
        """
        record = self.records.get(name)
        if record is None:
            raise CorruptError(f"the zip has no record {name!r}", file=self.file, span=self.span)
        return record

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte of the zip and of the byte after its last."""
        return self.start, self.start + self.n_bytes


@dataclass(frozen=True, slots=True)
class _DirectoryEntry:
    """An entry of the central directory.

    Args:
        stored: length of the data in the file, in bytes.
        n_bytes: length of the data, inflated if need be.
        header: offset of the local header, relative to the beginning of the zip.
    """

    name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    n_bytes: int
    header: int


def read_archive(
    store: ReadStore,
    file: str,
    *,
    start: int = 0,
    n_bytes: int | None = None,
    report: Report = raising,
) -> Archive:
    """Read the directory of a torch zip and check every header; the data is not read.

    Args:
        file: name in the store.
        start: byte at which the zip begins.
        n_bytes: length of the zip; None if it ends at the end of the file.
        report: receives the problems of single records; raises them by default.

    Raises:
        TruncatedError: the file ends too early.
        CorruptError: not a zip, or one that contradicts itself.
        UnsupportedError: entries are compressed by a method other than deflate, encrypted or at the
            top level; the zip spans several disks, or is a NumPy archive.
        CapacityError: the central directory has more than 2 GiB.
    """
    size = store.size(file)
    stop = size if n_bytes is None else start + n_bytes
    if start < 0 or stop < start or stop > size:
        raise TruncatedError(
            f"the zip extends past the end of the file, which is {size} bytes long",
            file=file,
            span=(start, stop),
        )
    return _ArchiveReader(store, file, start, stop, report).archive()


class _ArchiveReader:
    """Reads one zip.

    All offsets are relative to the beginning of the zip, except those called addresses.
    """

    def __init__(self, store: ReadStore, file: str, start: int, stop: int, report: Report) -> None:
        self._store = store
        self._file = file
        self._start = start
        self._size = stop - start
        self._report = report

    def archive(self) -> Archive:
        """Read the directory of the zip, and check the local headers.

        Raises:
            CheckpointingException: see ``read_archive``.
        """
        # Read the directory, and refuse other kinds of zips.
        directory, n_bytes, n_entries, n_trailing = self._find_directory()
        entries = list(self._entries(self._read(directory, n_bytes), n_entries))
        if entries and all(entry.name.endswith(b".npy") for entry in entries):
            raise UnsupportedError(
                "the file is a NumPy archive (.npz), not a torch.save file",
                file=self._file,
                hint="load it with numpy.load, and save its arrays with "
                "safetensors.numpy.save_file or torch.save",
                rule="torch.kind",
            )
        self._check_compression(entries)
        # Compare it with the local headers, and collect the records.
        offsets = self._data_offsets(entries, directory)
        root, records, headers = self._collect_records(entries, offsets)
        return Archive(
            self._file,
            self._start,
            self._size,
            root,
            records,
            self._start + directory,
            headers,
            n_trailing,
        )

    def _collect_records(
        self, entries: list[_DirectoryEntry], offsets: dict[int, int]
    ) -> tuple[str, dict[str, Record], tuple[int, ...]]:
        """Return the root, the records below it, and the addresses of their local headers.

        Anything ambiguous is reported.

        Args:
            offsets: offset of a local header → offset of the data; those of damaged records are
                missing.
        """
        root = ""
        records: dict[str, Record] = {}
        headers = []
        lower_names: set[str] = set()
        for entry in entries:
            # Other zip programs add entries for directories.
            name = self._name(entry.name)
            if name.endswith("/") and entry.n_bytes == 0:
                continue
            # All records must be below one directory.
            above, _, below = name.partition("/")
            if not below:
                raise UnsupportedError(
                    f"the zip has {name!r} at its top level, where torch.save writes no files",
                    file=self._file,
                )
            if records and above != root:
                self._report(
                    self._error(
                        "zip.roots",
                        f"the zip has records below {root!r} and below {above!r}",
                        entry.header,
                    )
                )
            root = root or above
            # torch ignores case when it looks for a record, and uses the later one.
            if below.casefold() in lower_names:
                self._report(
                    self._error(
                        "zip.duplicate", f"the zip has two records named {below!r}", entry.header
                    )
                )
                continue
            lower_names.add(below.casefold())
            # A record whose header is damaged has been reported.
            if entry.header in offsets:
                packed_bytes = entry.stored if entry.method == DEFLATED else None
                records[below] = Record(
                    self._start + offsets[entry.header], entry.n_bytes, entry.crc, packed_bytes
                )
                headers.append(self._start + entry.header)
        return root, records, tuple(headers)

    def _read(self, offset: int, n_bytes: int) -> bytes:
        return self._store.read(self._file, self._start + offset, n_bytes)

    def _contradiction(self, message: str, start: int = 0, n_bytes: int | None = None) -> NoReturn:
        """Raise a CorruptError about some bytes of the zip; by default, about all of it."""
        raise self._error("zip.directory", message, start, n_bytes)

    def _error(
        self, rule: str, message: str, start: int = 0, n_bytes: int | None = None
    ) -> CorruptError:
        stop = self._size if n_bytes is None else start + n_bytes
        return CorruptError(
            message,
            file=self._file,
            span=(self._start + start, self._start + stop),
            hint="do not use this file; copy it again, or use an older checkpoint",
            rule=rule,
        )

    def _find_directory(self) -> tuple[int, int, int, int]:
        """Return offset and length of the central directory, the number of its entries, and the
        number of bytes after the zip.
        """
        # The end record is the last part of the zip, except for a comment and bytes that a copy
        # appended.
        tail_start = max(0, self._size - _SEARCHED_BYTES - END64.size - LOCATOR64.size)
        tail = self._read(tail_start, self._size - tail_start)
        at, n_trailing = self._find_end_record(tail, tail_start)
        # ZIP64 records before it, which torch always writes, replace its values.
        values = END.unpack_from(tail, at)[1:7]
        expected_end = tail_start + at
        if at >= LOCATOR64.size and tail[at - LOCATOR64.size :].startswith(b"PK\x06\x07"):
            expected_end -= LOCATOR64.size + END64.size
            values = self._unpack_end64(tail, at, expected_end, values)
        disk, first_disk, n_on_disk, n_entries, n_bytes, offset = values
        if disk or first_disk or n_on_disk not in (n_entries, U16):
            raise UnsupportedError(
                "the zip spans several disks, which is not supported", file=self._file
            )
        if n_bytes > _MAX_DIRECTORY_BYTES:
            raise CapacityError(
                f"the zip's directory is {n_bytes >> 20:,} MiB long; the limit is "
                f"{_MAX_DIRECTORY_BYTES >> 20:,} MiB",
                file=self._file,
            )
        # The directory must end where the end records begin, or readers find different ones.
        if offset + n_bytes != expected_end or n_bytes < n_entries * CENTRAL.size:
            self._contradiction(
                f"the zip places {n_entries} directory entries at bytes "
                f"{offset}–{offset + n_bytes}, but the directory must end at byte {expected_end}"
            )
        return offset, n_bytes, n_entries, n_trailing

    def _unpack_end64(
        self, tail: bytes, at: int, expected: int, narrow: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Unpack the ZIP64 end record: two disks, two numbers of entries, length, offset.

        Args:
            tail: the last bytes of the zip.
            at: position of the end record in ``tail``.
            expected: offset at which the ZIP64 end record must begin.
            narrow: the same values in the end record, which must agree if they fit there.
        """
        # The locator must refer to the bytes directly before it.
        end_bytes = END64.size + LOCATOR64.size + END.size
        _, disk, at64, n_disks = LOCATOR64.unpack_from(tail, at - LOCATOR64.size)
        if disk or n_disks > 1:
            raise UnsupportedError(
                "the zip spans several disks, which is not supported", file=self._file
            )
        record_at = at - LOCATOR64.size - END64.size
        if at64 != expected or record_at < 0:
            self._contradiction(
                "the zip's ZIP64 end record is not where its locator points",
                max(0, expected),
                end_bytes,
            )
        mark, length, _, _, *values = END64.unpack_from(tail, record_at)
        if mark != b"PK\x06\x06" or length != END64.size - 12:
            self._contradiction("the zip's ZIP64 end record is malformed", at64, END64.size)
        limits = (U16, U32, U32)
        for value, wide_value, limit in zip(narrow[3:], values[3:], limits, strict=True):
            if value not in (wide_value, limit):
                self._contradiction("the zip's two end records differ", at64, end_bytes)
        return tuple(values)

    def _find_end_record(self, tail: bytes, tail_start: int) -> tuple[int, int]:
        """Return the position of the end record in the last bytes of the zip, and the number of
        bytes after the record and its comment.

        Args:
            tail_start: offset of ``tail``.
        """
        # Where bytes follow, the record must be where it says that the directory ends: a tensor of
        # a file that was cut may hold the end of another zip.
        end_records, followed = [], []
        at = tail.rfind(b"PK\x05\x06")
        while at >= 0:
            if at + END.size <= len(tail):
                n_trailing = len(tail) - at - END.size - END.unpack_from(tail, at)[-1]
                if n_trailing == 0:
                    end_records.append((at, n_trailing))
                elif n_trailing > 0 and _stated_position(tail, at) == tail_start + at:
                    followed.append((at, n_trailing))
            at = tail.rfind(b"PK\x05\x06", 0, at + 3)
        end_records = end_records or followed
        if len(end_records) > 1:
            self._contradiction("the zip has two end records")
        if end_records:
            return end_records[0]
        # A file that begins like a zip was cut short; any other is not a zip.
        if self._size >= 4 and self._read(0, 4) == LOCAL_SIGNATURE:
            raise TruncatedError(
                "the zip has no end record, because it was cut short or its writer did not finish",
                file=self._file,
                span=(self._start, self._start + self._size),
                hint="copy the file again, or use an older checkpoint",
            )
        raise CorruptError(
            "the file is not a zip",
            file=self._file,
            span=(self._start, self._start + self._size),
            hint=UNLIKE_ANY_WRITER,
        )

    def _entries(self, data: bytes, n_entries: int) -> Iterator[_DirectoryEntry]:
        """Yield the entries of the central directory."""
        position = 0
        unpack = CENTRAL.unpack_from
        for _ in range(n_entries):
            # An entry consists of a fixed part, name, extra field and comment.
            if position + CENTRAL.size > len(data):
                self._contradiction(
                    f"the zip's directory has fewer entries than the {n_entries} that its end "
                    "record counts"
                )
            fields = unpack(data, position)
            mark, _, _, flags, method, _, _, crc, stored, size = fields[:10]
            n_name, n_extra, n_comment, disk, _, _, header = fields[10:]
            end = position + CENTRAL.size + n_name + n_extra + n_comment
            if mark != b"PK\x01\x02" or end > len(data):
                self._contradiction("the zip's directory is malformed")
            name = data[position + CENTRAL.size : position + CENTRAL.size + n_name]
            # Values that do not fit are in the ZIP64 field.
            if U32 in (stored, size, header) or disk == U16:
                extra = data[position + CENTRAL.size + n_name : end - n_comment]
                size, stored, header, disk = self._widen(extra, (size, stored, header, disk))
            self._check_readable(name, flags, disk)
            if stored != size and method == STORED:
                self._report(
                    self._error(
                        "zip.sizes",
                        f"an uncompressed zip record has two different sizes, {stored} and {size} "
                        "bytes",
                        header,
                    )
                )
            yield _DirectoryEntry(name, flags, method, crc, stored, size, header)
            position = end
        if position != len(data):
            self._contradiction(
                f"the zip's directory is {len(data) - position} bytes longer than its {n_entries} "
                "entries"
            )

    def _check_readable(self, name: bytes, flags: int, disk: int) -> None:
        """Report an encrypted or patched record; raise if it is on another disk."""
        if flags & (_ENCRYPTED | _MASKED):
            self._report(
                UnsupportedError(
                    f"the zip record {self._name(name)!r} is encrypted",
                    file=self._file,
                    rule="zip.unreadable",
                )
            )
        if flags & _PATCHED:
            self._report(
                UnsupportedError(
                    f"the zip record {self._name(name)!r} contains patched data, which is not "
                    "supported",
                    file=self._file,
                    rule="zip.unreadable",
                )
            )
        if disk:
            raise UnsupportedError(
                "the zip spans several disks, which is not supported", file=self._file
            )

    def _check_compression(self, entries: list[_DirectoryEntry]) -> None:
        """Check that every record is stored, or deflated to a possible length."""
        for entry in entries:
            if entry.method == STORED:
                continue
            # A length that deflate cannot produce is refused before memory is allocated for it.
            if entry.method == DEFLATED:
                if entry.n_bytes > MAX_INFLATION * entry.stored:
                    self._contradiction(
                        f"record {self._name(entry.name)!r} has only {entry.stored} deflated "
                        f"bytes, too few to inflate to {entry.n_bytes} bytes"
                    )
                continue
            if any(other.name.endswith(b"/constants.pkl") for other in entries):
                raise _torchscript(self._file)
            self._report(
                UnsupportedError(
                    f"the zip record {self._name(entry.name)!r} is compressed with method "
                    f"{entry.method}, which torch does not use",
                    file=self._file,
                    hint="load the file with torch and save it again, or repack it with zip -0",
                    rule="zip.unreadable",
                )
            )

    def _widen(self, extra: bytes, narrow: tuple[int, int, int, int]) -> list[int]:
        """Return size, stored size, header offset and disk, replaced by ZIP64 values if too large.

        Args:
            extra: the extra field, which contains the ZIP64 field.
            narrow: the four values in the directory or header.
        """
        # The ZIP64 field contains, in this order, only the values that do not fit.
        field = self._zip64_field(extra)
        values = []
        for number, value in enumerate(narrow):
            limit, width = (U16, 4) if number == 3 else (U32, 8)
            if value == limit and field is not None and len(field) >= width:
                value, field = int.from_bytes(field[:width], "little"), field[width:]
            # Without a ZIP64 field, the limit itself is the value.
            elif value == limit and number != 3 and field is not None:
                self._contradiction("a ZIP64 field is too short")
            values.append(value)
        return values

    def _zip64_field(self, extra: bytes) -> bytes | None:
        """Return the content of the ZIP64 field (kind 1) in an extra field; None if it has none."""
        at = 0
        while at + 4 <= len(extra):
            kind, n = struct.unpack_from("<HH", extra, at)
            if at + 4 + n > len(extra):
                break
            if kind == 1:
                return extra[at + 4 : at + 4 + n]
            at += 4 + n
        return None

    def _name(self, raw: bytes) -> str:
        """Return the name of a record as text; raise CorruptError if it is malformed."""
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = ""
        if not name or "\0" in name:
            self._contradiction(f"a zip record has the invalid name {raw[:80]!r}")
        return name

    def _data_offsets(self, entries: list[_DirectoryEntry], end: int) -> dict[int, int]:
        """Read and check every local header; return offset of the header → offset of the data.

        Records whose headers are damaged are reported, and missing from the result.

        Args:
            end: offset of the central directory.
        """
        # The first record must begin where the zip begins.
        ordered = sorted(entries, key=lambda entry: entry.header)
        if self._store.is_remote and self._report is raising:
            certain = _offsets_of_aligned(ordered, end)
            if certain is not None:
                return certain
        if ordered and ordered[0].header != 0:
            message = f"{ordered[0].header} bytes precede the zip's first record"
            self._report(self._error("zip.directory", message, 0, ordered[0].header))
        data_offsets: dict[int, int] = {}
        window_start, window = 0, b""
        unpack = LOCAL.unpack_from
        for number, entry in enumerate(ordered):
            need = entry.header + LOCAL.size + len(entry.name)
            limit = ordered[number + 1].header if number + 1 < len(ordered) else end
            # Neither header nor data may reach into the next record.
            if need + entry.stored > limit:
                self._report(self._overlap(entry, limit))
                continue
            # Headers close to each other are read together.
            if need > window_start + len(window):
                window_start = entry.header
                window = self._read(window_start, _window_end(ordered, number) - window_start)
            header_at = entry.header - window_start
            fields = unpack(window, header_at)
            n_name, n_extra = fields[-2:]
            # A header with another name is not that of the record.
            name_at = header_at + LOCAL.size
            name = window[name_at : name_at + n_name]
            if (fields[0], n_name, name) != (LOCAL_SIGNATURE, len(entry.name), entry.name):
                record = self._name(entry.name)
                message = (
                    f"the zip's directory and the local header of record {record!r} do not match"
                )
                self._report(self._error("zip.header", message, entry.header, LOCAL.size + n_name))
                continue
            for message in self._header_differences(entry, fields, need):
                self._report(self._error("zip.header", message, entry.header, LOCAL.size + n_name))
            # The extra field is part of the header only, so the end was not known before.
            if need + n_extra + entry.stored > limit:
                self._report(self._overlap(entry, limit))
            data_offsets[entry.header] = need + n_extra
        return data_offsets

    def _header_differences(
        self, entry: _DirectoryEntry, fields: tuple[int, ...], extra: int
    ) -> Iterator[str]:
        """Yield the differences between an entry of the directory and its local header.

        Args:
            fields: the unpacked local header.
            extra: offset of its extra field.
        """
        # The flag for UTF-8 does not matter, as torch and this reader ignore it.
        _, _, flags, method, _, _, crc, stored, size, _, n_extra = fields
        if (flags | _UTF8) != (entry.flags | _UTF8) or method != entry.method:
            yield (
                f"record {self._name(entry.name)!r} has different flags in the directory and in "
                "its header"
            )
        # With a descriptor, the sizes in the header may be 0; without one, they and the CRC count.
        if flags & HAS_DESCRIPTOR:
            if (size or stored) and not (
                size in (entry.n_bytes, U32) and stored in (entry.stored, U32)
            ):
                yield (
                    f"record {self._name(entry.name)!r} has different sizes in the directory and "
                    "in its header"
                )
            return
        if U32 in (size, stored):
            size, stored, *_ = self._widen(self._read(extra, n_extra), (size, stored, 0, 0))
        if (size, stored, crc) != (entry.n_bytes, entry.stored, entry.crc):
            yield (
                f"record {self._name(entry.name)!r} has {entry.n_bytes} bytes ({entry.stored} "
                f"stored, CRC {entry.crc:08x}) according to the directory, but {size} ({stored} "
                f"stored, CRC {crc:08x}) according to its header"
            )

    def _overlap(self, entry: _DirectoryEntry, limit: int) -> CorruptError:
        """Return the error for a record that reaches beyond the offset ``limit``."""
        return self._error(
            "zip.overlap",
            f"record {self._name(entry.name)!r} of {entry.stored} bytes overlaps the data that "
            f"follows it at byte {limit}",
            entry.header,
            LOCAL.size + len(entry.name) + entry.stored,
        )


def _stated_position(tail: bytes, at: int) -> int:
    """Return the offset at which an end record lies according to itself or its ZIP64 locator.

    Args:
        at: position of the end record in ``tail``.
    """
    locator = tail[max(0, at - LOCATOR64.size) : at]
    if len(locator) == LOCATOR64.size and locator.startswith(b"PK\x06\x07"):
        return int(LOCATOR64.unpack(locator)[2]) + END64.size + LOCATOR64.size
    n_bytes, offset = END.unpack_from(tail, at)[5:7]
    return int(n_bytes + offset)


def _offsets_of_aligned(ordered: list[_DirectoryEntry], end: int) -> dict[int, int] | None:
    """Return offset of the header → offset of the data, from the directory alone.

    torch aligns the data of every record to 64 bytes, and writes a descriptor of 16 or 24 bytes
    after it. So the data ends where the descriptor before the next header begins. Reading a header
    per record would be a request each.

    Returns:
        None unless every record is as torch writes it.
    """
    offsets = {}
    for number, entry in enumerate(ordered):
        need = entry.header + LOCAL.size + len(entry.name)
        limit = ordered[number + 1].header if number + 1 < len(ordered) else end
        sizes = (16, 24) if entry.flags & HAS_DESCRIPTOR else (0,)
        candidates = [
            start
            for start in (limit - n_bytes - entry.stored for n_bytes in sizes)
            if start % _ALIGNMENT == 0 and 0 <= start - need <= _ALIGNMENT + _MAX_FIELD
        ]
        if len(candidates) != 1:
            return None
        offsets[entry.header] = candidates[0]
    return offsets if ordered and ordered[0].header == 0 else None


def _window_end(ordered: list[_DirectoryEntry], number: int) -> int:
    """Return the end of the last local header to read together with that of entry ``number``.

    Args:
        ordered: the entries by increasing offset of their headers.
    """
    first = ordered[number].header
    end = first + LOCAL.size + len(ordered[number].name)
    for other in range(number + 1, len(ordered)):
        entry = ordered[other]
        if entry.header > end + _READ_AHEAD or entry.header > first + _MAX_READ:
            break
        end = max(end, entry.header + LOCAL.size + len(entry.name))
    return end


def check_kind(archive: Archive) -> None:
    """Raise unless the zip is of the kind that ``torch.save`` writes.

    Raises:
        UnsupportedError: TorchScript, or another kind of zip.
    """
    if "constants.pkl" in archive.records:
        raise _torchscript(archive.file)
    if "data.pkl" not in archive.records:
        raise UnsupportedError(
            "the zip has no data.pkl, which torch.save always writes",
            file=archive.file,
            hint="pass a file that torch.save wrote; if this zip contains a checkpoint, unpack it",
            rule="torch.kind",
        )


def _torchscript(file: str) -> UnsupportedError:
    return UnsupportedError(
        "the file is a TorchScript program, not a checkpoint",
        file=file,
        hint="load it with torch.jit.load and save its state_dict()",
    )
