"""Reading the manifest and the nodes of an OCDBT database: from bytes to checked, plain values.

::

    manifest, node:    magic (u32 big-endian) · length (u64) · version, compression (varints) ·
                       body · CRC-32C (u32)

    manifest body:     uuid · kind · max_inline · max_decoded · arity · compression (level) ·
                       files · versions · …
    versions:          count · generations · root heights · file numbers · offsets · lengths ·
                       statistics · commit times
    B-tree node body:  height · files · count · entries
    leaf entries:      key prefix lengths · key suffix lengths · suffixes · value lengths · kinds ·
                       file numbers · offsets · inline values
    interior entries:  key prefix lengths · key suffix lengths · common prefix lengths · suffixes ·
                       file numbers · offsets · lengths · statistics
    files:             count · path prefix lengths · path suffix lengths · base lengths · suffixes

Tables are stored column by column, numbers as LEB128 varints. Keys and paths omit the prefix that
they share with the previous one. Because of this and zstd, a few bytes can inflate to gigabytes; an
``UnfoldBudget`` limits the size of one database in memory.

Versions: version 0 of the manifest and of the nodes, bodies uncompressed or zstd.

Not supported, refused by name: manifests of kind ``numbered``.

Source: tensorstore's documentation of the ocdbt driver (storage format); databases written by
    tensorstore 0.1.86.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from core.arrays.checksum import crc32c
from core.errors import (
    UNLIKE_ANY_WRITER,
    CorruptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    suggesting,
)
from core.values import dataclass

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
MAX_NODE_BYTES = 256 << 20
_MAX_PATH_BYTES = 4096
_MAX_KEY_BYTES = 65535
_MAX_WINDOW_BYTES = 32 << 20
_HEAD_BYTES = 12
_MISSING = (1 << 64) - 1


class UnfoldBudget:
    """A limit on the inflated size of the nodes of one database, in bytes.

    Args:
        n_bytes: budget at the beginning.
        ratio: bytes that each stored byte adds, the first time that it is read.
    """

    def __init__(self, n_bytes: int = 16 << 20, *, ratio: int = 64) -> None:
        self._n_left = n_bytes
        self._ratio = ratio

    def earn(self, n_stored: int) -> None:
        """Add the budget of stored bytes that are read for the first time."""
        self._n_left += self._ratio * n_stored

    def spend(self, n_bytes: int) -> None:
        """Take bytes from the budget before they are allocated.

        Raises:
            UnsafeError: the budget is exhausted.
        """
        self._n_left -= n_bytes
        if self._n_left < 0:
            raise UnsafeError(
                "the database decompresses to far more data than its files could contain",
                hint="do not trust this checkpoint; find out who wrote it",
            )


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """A range of bytes in a data file.

    Args:
        base: directory to which paths in a node at this location are relative; "" or ends with "/".
        path: path of the file, relative to the database.
        offset, n_bytes: first byte and number of bytes.
    """

    base: str
    path: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class OcdbtManifest:
    """The newest version that a manifest lists.

    Args:
        root: location of the root node; None for a database without entries.
        height: height of the root, 0 for a leaf.
        n_keys: number of entries of the tree, as recorded.
    """

    root: ValueLocation | None
    height: int
    n_keys: int


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """An entry of a node.

    Args:
        key: key relative to the node's prefix.
        value: bytes in the node, or their location; in an interior node always the child's
            location.
        n_common: number of bytes of ``key`` with which all keys of the child begin; 0 in a leaf.
    """

    key: bytes
    value: bytes | ValueLocation
    n_common: int = 0


class _Cursor:
    """Reader of a body, from beginning to end."""

    def __init__(self, data: bytes, budget: UnfoldBudget) -> None:
        self._data = data
        self._at = 0
        self.budget = budget

    def take(self, n_bytes: int) -> bytes:
        """Read ``n_bytes`` bytes; raise CorruptError if fewer follow."""
        data = self._data[self._at : self._at + n_bytes]
        if len(data) != n_bytes:
            raise CorruptError(f"the body ends {n_bytes - len(data)} bytes too early")
        self._at += n_bytes
        return data

    def byte(self) -> int:
        """Read one byte."""
        return self.take(1)[0]

    def number(self) -> int:
        """Read a varint below 2⁶⁴."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise CorruptError("a number has more than 64 bits")
        if value > _MISSING:
            raise CorruptError("a number has more than 64 bits")
        return value

    def count(self) -> int:
        """Read the number of items that follow, each of at least one byte."""
        n_items = self.number()
        n_bytes = len(self._data) - self._at
        if n_items > n_bytes:
            raise CorruptError(f"{n_items} items should follow, but only {n_bytes} bytes follow")
        return n_items

    def numbers(self, n: int) -> list[int]:
        """Read ``n`` varints."""
        return [self.number() for _ in range(n)]

    def end(self) -> None:
        """Raise CorruptError unless all bytes were read."""
        if self._at != len(self._data):
            raise CorruptError(
                f"{len(self._data) - self._at} extra bytes follow the end of the body"
            )


@suggesting(UNLIKE_ANY_WRITER)
def parse_newest_version(data: bytes, budget: UnfoldBudget) -> OcdbtManifest:
    """Parse the newest version that a manifest lists.

    Args:
        data: content of the file.
        budget: budget of the database.

    Raises:
        CorruptError, TruncatedError: the manifest is damaged.
        UnsupportedError: the version, compression or kind is not supported.
        UnsafeError: the manifest inflates too much.
    """
    # The configuration. Skip the fields that do not matter for reading: the UUID, the limits and
    # arity of writers, and the compression level.
    cursor = _Cursor(unwrap(data, MANIFEST_MAGIC, budget), budget)
    cursor.take(16)
    if cursor.number() != 0:
        raise UnsupportedError(
            "manifests of kind 'numbered' are not supported",
            hint="use TensorStore to copy the database into one with a single manifest",
        )
    cursor.numbers(2)
    cursor.byte()
    compression = cursor.number()
    if compression > 1:
        raise UnsupportedError(f"unknown compression method {compression}")
    cursor.take(4 * compression)

    # The table of versions, of which the last one is the newest. An empty tree has no root.
    files = _parse_files(cursor, base="")
    n_versions = cursor.count()
    if n_versions == 0:
        return OcdbtManifest(None, 0, 0)
    cursor.numbers(n_versions)
    heights = cursor.take(n_versions)
    locations = list(_parse_locations(cursor, n_versions, files, may_be_missing=True))
    n_keys = cursor.numbers(n_versions)[-1]
    return OcdbtManifest(locations[-1], heights[-1], n_keys)


@suggesting(UNLIKE_ANY_WRITER)
def parse_node(
    data: bytes, location: ValueLocation, height: int, budget: UnfoldBudget
) -> list[NodeEntry]:
    """Parse the entries of a B-tree node, in the order of their keys.

    Args:
        data: bytes of the node.
        location: location of the node.
        height: height of the node according to its parent.
        budget: budget of the database.

    Raises:
        CorruptError, TruncatedError: the node is damaged, or has another height.
        UnsupportedError: the version or compression is not supported.
        UnsafeError: the node inflates too much.
    """
    cursor = _Cursor(unwrap(data, NODE_MAGIC, budget), budget)
    own_height = cursor.byte()
    if own_height != height:
        raise CorruptError(f"the node has height {own_height}, but its parent requires {height}")
    files = _parse_files(cursor, base=location.base)
    n_entries = cursor.count()
    if n_entries == 0:
        raise CorruptError("the node has no entries")
    parse_entries = _parse_interior if height else _parse_leaf
    entries = list(parse_entries(cursor, n_entries, files))
    cursor.end()
    for first, second in pairwise(entries):
        if first.key >= second.key:
            raise CorruptError(
                f"the keys are not in order: {second.key[:80]!r} follows {first.key[:80]!r}"
            )
    return entries


def _parse_leaf(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[NodeEntry]:
    """Yield the ``n`` entries of a leaf; raise CorruptError if a column is invalid."""
    prefixes, suffixes = cursor.numbers(n - 1), cursor.numbers(n)
    keys = list(_read_strings(cursor, prefixes, suffixes, limit=_MAX_KEY_BYTES))
    # A value is in the node (kind 0) or in a data file (kind 1).
    lengths = cursor.numbers(n)
    kinds = cursor.numbers(n)
    if set(kinds) - {0, 1}:
        raise CorruptError(f"a value has the unknown kind {max(kinds)}")
    # File numbers and offsets are only listed for the values in data files.
    indirect_lengths = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    numbers = cursor.numbers(len(indirect_lengths))
    offsets = cursor.numbers(len(indirect_lengths))
    locations = iter(
        [_location(files, *row) for row in zip(numbers, offsets, indirect_lengths, strict=True)]
    )
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        yield NodeEntry(key, next(locations) if kind else cursor.take(length))


def _parse_interior(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[NodeEntry]:
    """Yield the ``n`` entries of an interior node; raise CorruptError if a column is invalid."""
    prefixes, suffixes = cursor.numbers(n - 1), cursor.numbers(n)
    common_lengths = cursor.numbers(n)
    keys = list(_read_strings(cursor, prefixes, suffixes, limit=_MAX_KEY_BYTES))
    locations = list(_parse_locations(cursor, n, files))
    # Skip the three columns of statistics.
    cursor.numbers(3 * n)
    for key, location, n_common in zip(keys, locations, common_lengths, strict=True):
        if n_common > len(key):
            raise CorruptError(
                f"the common prefix of the key {key[:80]!r} is {n_common} bytes long, longer than "
                "the key itself"
            )
        assert location is not None
        yield NodeEntry(key, location, n_common)


def _read_strings(
    cursor: _Cursor, prefixes: list[int], suffixes: list[int], *, limit: int
) -> Iterator[bytes]:
    """Yield byte strings that are stored without the prefix shared with the previous one.

    Args:
        prefixes, suffixes: number of shared bytes (not for the first string) and of other bytes.
        limit: maximum number of bytes of a string.
    """
    text = b""
    for n_prefix, n_suffix in zip((0, *prefixes), suffixes, strict=True):
        if n_prefix > len(text):
            raise CorruptError(
                f"a name shares {n_prefix} bytes with the previous name, which is only "
                f"{len(text)} bytes long"
            )
        if n_prefix + n_suffix > limit:
            raise CorruptError(f"a name is {n_prefix + n_suffix} bytes long; the limit is {limit}")
        # 64 bytes for the object itself.
        cursor.budget.spend(n_prefix + n_suffix + 64)
        text = text[:n_prefix] + cursor.take(n_suffix)
        yield text


def _parse_files(cursor: _Cursor, *, base: str) -> list[tuple[str, str]]:
    """Read the table of data files.

    Args:
        base: directory to which the paths in the table are relative; "" or ends with "/".

    Returns:
        Base directory for the paths inside each file, and path of the file; both relative to the
        database.
    """
    n = cursor.count()
    if n == 0:
        return []
    prefixes, suffixes, bases = cursor.numbers(n - 1), cursor.numbers(n), cursor.numbers(n)
    paths = _read_strings(cursor, prefixes, suffixes, limit=_MAX_PATH_BYTES)
    files = []
    for raw, n_base in zip(paths, bases, strict=True):
        # The first n_base bytes of the path are the base for the file's own contents.
        try:
            path = raw.decode("utf-8")
            inner = raw[:n_base].decode("utf-8")
        except UnicodeDecodeError as err:
            raise CorruptError(f"the file name {raw[:80]!r} is not valid UTF-8") from err
        if n_base > len(raw):
            raise CorruptError(
                f"the base of the path {path[:80]!r} is {n_base} bytes long, longer than the path "
                "itself"
            )
        files.append((base + inner, base + path))
    return files


def _parse_locations(
    cursor: _Cursor, n: int, files: list[tuple[str, str]], *, may_be_missing: bool = False
) -> Iterator[ValueLocation | None]:
    """Yield ``n`` locations; None for a missing one, if there may be any."""
    numbers, offsets, lengths = (cursor.numbers(n) for _ in range(3))
    for number, offset, length in zip(numbers, offsets, lengths, strict=True):
        is_missing = may_be_missing and offset == length == _MISSING
        yield None if is_missing else _location(files, number, offset, length)


def _location(files: list[tuple[str, str]], number: int, offset: int, length: int) -> ValueLocation:
    """Return a location; raise CorruptError if the file number or the range is impossible."""
    if number >= len(files):
        raise CorruptError(
            f"an entry refers to data file {number}, but the table lists only {len(files)}"
        )
    if offset + length > _MISSING:
        raise CorruptError(f"an entry has an impossible range: {length} bytes at byte {offset}")
    base, path = files[number]
    return ValueLocation(base, path, offset, length)


def unwrap(data: bytes, magic: int, budget: UnfoldBudget) -> bytes:
    """Check the envelope of a manifest or node, and return its inflated body.

    Args:
        data: bytes of the manifest or node.
        magic: expected magic number.
        budget: budget of the database.

    Raises:
        CorruptError, TruncatedError: magic number, length or checksum is wrong.
        UnsupportedError: the version or compression is unknown.
        UnsafeError: the body inflates too much.
    """
    # Check magic number, length and checksum before anything else.
    if len(data) < _HEAD_BYTES + 6:
        raise TruncatedError(f"{len(data)} bytes are too few for a node")
    actual_magic, length = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:12], "little")
    if actual_magic != magic:
        raise CorruptError(f"the magic number is {actual_magic:#010x}, not {magic:#010x}")
    if length != len(data):
        raise (TruncatedError if length > len(data) else CorruptError)(
            f"the data is {len(data)} bytes long, but its header records {length} bytes"
        )
    recorded_crc = int.from_bytes(data[-4:], "little")
    crc = crc32c(data[:-4])
    if recorded_crc != crc:
        raise CorruptError(
            f"checksum mismatch: the CRC-32C is {crc:08x}, but {recorded_crc:08x} is recorded"
        )

    # Inflate the body.
    version, compression = data[_HEAD_BYTES], data[_HEAD_BYTES + 1]
    if version != 0 or compression > 1:
        raise UnsupportedError(f"version {version} with compression {compression} is not supported")
    body = data[_HEAD_BYTES + 2 : -4]
    if compression:
        return _inflate(body, budget)
    budget.spend(len(body))
    return body


def _inflate(body: bytes, budget: UnfoldBudget) -> bytes:
    """Inflate a body with zstd, in blocks, so that the budget limits the memory.

    Raises:
        CorruptError: the stream is damaged.
        UnsafeError: the body exceeds the budget or the maximum size of a node.
    """
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(body)
    inflated = bytearray()
    try:
        while block := reader.read(1 << 16):
            budget.spend(len(block))
            inflated += block
            if len(inflated) > MAX_NODE_BYTES:
                raise UnsafeError(f"a node decompresses to more than {MAX_NODE_BYTES >> 20} MiB")
    except zstandard.ZstdError as err:
        raise CorruptError(f"the zstd stream is damaged: {err}") from err
    return bytes(inflated)
