"""Reading the manifest and the nodes of an OCDBT database: from bytes to checked, plain values.

::

    manifest, node = magic (u32 big-endian) · length (u64) · version, compression (varints) · body ·
    CRC-32C (u32)

    manifest body:   uuid · kind · max_inline · max_decoded · arity · compression (level) · files · versions · …
    versions:        count · generations · root heights · file numbers · offsets · lengths · statistics · commit times
    B-tree node body: height · files · count · entries
      leaf entries:     key prefix lengths · key suffix lengths · suffixes · value lengths · kinds · file numbers ·
                        offsets · inline values
      interior entries: key prefix lengths · key suffix lengths · common prefix lengths · suffixes ·
      file numbers ·
                        offsets · lengths · statistics
    files:           count · path prefix lengths · path suffix lengths · base lengths · suffixes

Everything repeated is stored column by column, numbers as LEB128 varints, keys and paths without
the prefix that they share with the one before. Such tables and zstd can stand for far more than
they take; an ``UnfoldBudget`` bounds what one database may unfold to.

Versions: version 0 of the manifest and of the nodes, bodies uncompressed or zstd.

Not supported, refused by name: manifests of the kind ``numbered``.

Source: tensorstore's documentation of the ocdbt driver (storage format); databases written by
    tensorstore 0.1.86.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from core.arrays.checksum import crc32c
from core.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedError

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
MAX_NODE_BYTES = 256 << 20
_MAX_PATH_BYTES = 4096
_MAX_KEY_BYTES = 65535
_MAX_WINDOW_BYTES = 32 << 20
_HEAD_BYTES = 12
_MISSING = (1 << 64) - 1


class UnfoldBudget:
    """A limit on what the nodes of one database may unfold to.

    Every stored byte of the tree adds ``ratio`` bytes, once; every unfolded byte takes one.

    Args:
        n_bytes: budget at the beginning.
        ratio: bytes that each stored byte adds.
    """

    def __init__(self, n_bytes: int = 16 << 20, *, ratio: int = 64) -> None:
        self._n_left = n_bytes
        self._ratio = ratio

    def earn(self, n_stored: int) -> None:
        """Add the budget of bytes that are read for the first time."""
        self._n_left += self._ratio * n_stored

    def spend(self, n_bytes: int) -> None:
        """Take bytes from the budget before they are made.

        Raises:
            UnsafeError: more is made than the bytes that were read allow.
        """
        self._n_left -= n_bytes
        if self._n_left < 0:
            raise UnsafeError(
                "the database unfolds to far more than its files hold",
                hint="do not trust this checkpoint; ask where it came from",
            )


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """A range of bytes in a data file.

    Args:
        base: directory that paths inside a node at this location are relative to; "" or ends with
            "/".
        path: path of the file, relative to the database.
        offset, n_bytes: first byte, and number of bytes.
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
        n_keys: number of entries of the tree, as stated.
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
        n_common: bytes of ``key`` with which all keys of the child begin; 0 in a leaf.
    """

    key: bytes
    value: bytes | ValueLocation
    n_common: int = 0


class _Cursor:
    """Reads a body from begin to end."""

    def __init__(self, data: bytes, budget: UnfoldBudget) -> None:
        self._data = data
        self._at = 0
        self.budget = budget

    def take(self, n_bytes: int) -> bytes:
        """Read some bytes."""
        taken_bytes = self._data[self._at : self._at + n_bytes]
        if len(taken_bytes) != n_bytes:
            raise CorruptError(f"it ends {n_bytes - len(taken_bytes)} bytes too early")
        self._at += n_bytes
        return taken_bytes

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
        n = self.number()
        if n > len(self._data) - self._at:
            raise CorruptError(
                f"{n} items are announced, but only {len(self._data) - self._at} bytes follow"
            )
        return n

    def numbers(self, n: int) -> list[int]:
        """Read ``n`` varints."""
        return [self.number() for _ in range(n)]

    def end(self) -> None:
        """Raise if anything follows."""
        if self._at != len(self._data):
            raise CorruptError(f"{len(self._data) - self._at} bytes follow its end")


def read_manifest(data: bytes, budget: UnfoldBudget) -> OcdbtManifest:
    """Read the newest version that a manifest lists.

    Args:
        data: content of the file.

    Raises:
        CorruptError, TruncatedError: the manifest is damaged.
        UnsupportedError: the version, compression or kind is not supported.
        UnsafeError: the manifest unfolds to too much.
    """
    cursor = _Cursor(unwrap(data, MANIFEST_MAGIC, budget), budget)
    # The configuration: only what decides how to read on is looked at.
    cursor.take(16)
    if cursor.number() != 0:
        raise UnsupportedError(
            "manifests of the kind 'numbered' are not supported",
            hint="write the database again as a single one",
        )
    cursor.numbers(2)
    cursor.byte()
    compression = cursor.number()
    if compression > 1:
        raise UnsupportedError(f"unknown compression method {compression}")
    cursor.take(4 * compression)
    # The table of versions; the last one is the newest.
    files = _read_files(cursor, base="")
    n = cursor.count()
    if n == 0:
        return OcdbtManifest(None, 0, 0)
    cursor.numbers(n)
    heights = cursor.take(n)
    locations = list(_read_locations(cursor, n, files, may_be_missing=True))
    n_keys = cursor.numbers(n)[-1]
    return OcdbtManifest(locations[-1], heights[-1], n_keys)


def read_node(
    data: bytes, location: ValueLocation, height: int, budget: UnfoldBudget
) -> list[NodeEntry]:
    """Read the entries of a B-tree node, in the order of their keys.

    Args:
        data: bytes of the node.
        location: location of the node.
        height: height that its parent states.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``read_manifest``.
    """
    cursor = _Cursor(unwrap(data, NODE_MAGIC, budget), budget)
    stated_height = cursor.byte()
    if stated_height != height:
        raise CorruptError(f"the node states the height {stated_height}, but its parent {height}")
    files = _read_files(cursor, base=location.base)
    n = cursor.count()
    if n == 0:
        raise CorruptError("the node has no entries")
    entries = list(_read_interior(cursor, n, files) if height else _read_leaf(cursor, n, files))
    cursor.end()
    for first, second in pairwise(entries):
        if first.key >= second.key:
            raise CorruptError(
                f"the keys are not in order: {first.key[:80]!r}, {second.key[:80]!r}"
            )
    return entries


def _read_leaf(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[NodeEntry]:
    """Yield the entries of a leaf."""
    keys = list(
        _read_strings(cursor, cursor.numbers(n - 1), cursor.numbers(n), limit=_MAX_KEY_BYTES)
    )
    lengths = cursor.numbers(n)
    kinds = cursor.numbers(n)
    if set(kinds) - {0, 1}:
        raise CorruptError(f"a value has the unknown kind {max(kinds)}")
    indirect = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    numbers = cursor.numbers(len(indirect))
    offsets = cursor.numbers(len(indirect))
    locations = iter(
        [_location(files, *row) for row in zip(numbers, offsets, indirect, strict=True)]
    )
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        yield NodeEntry(key, next(locations) if kind else cursor.take(length))


def _read_interior(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[NodeEntry]:
    """Yield the entries of an interior node."""
    prefixes, suffixes = cursor.numbers(n - 1), cursor.numbers(n)
    commons = cursor.numbers(n)
    keys = list(_read_strings(cursor, prefixes, suffixes, limit=_MAX_KEY_BYTES))
    locations = list(_read_locations(cursor, n, files))
    cursor.numbers(3 * n)
    for key, location, n_common in zip(keys, locations, commons, strict=True):
        if n_common > len(key):
            raise CorruptError(f"{n_common} bytes of the key {key[:80]!r} are stated as common")
        assert location is not None
        yield NodeEntry(key, location, n_common)


def _read_strings(
    cursor: _Cursor, prefixes: list[int], suffixes: list[int], *, limit: int
) -> Iterator[bytes]:
    """Yield prefix-compressed byte strings."""
    last = b""
    for n_prefix, n_suffix in zip((0, *prefixes), suffixes, strict=True):
        if n_prefix > len(last):
            raise CorruptError(f"an entry shares {n_prefix} bytes with one of {len(last)} bytes")
        if n_prefix + n_suffix > limit:
            raise CorruptError(f"a name has {n_prefix + n_suffix} bytes, more than {limit}")
        cursor.budget.spend(n_prefix + n_suffix + 64)
        last = last[:n_prefix] + cursor.take(n_suffix)
        yield last


def _read_files(cursor: _Cursor, *, base: str) -> list[tuple[str, str]]:
    """Read the base of contents and the path of every data file, relative to the database."""
    n = cursor.count()
    if n == 0:
        return []
    prefixes, suffixes, bases = cursor.numbers(n - 1), cursor.numbers(n), cursor.numbers(n)
    files = []
    for raw, n_base in zip(
        _read_strings(cursor, prefixes, suffixes, limit=_MAX_PATH_BYTES), bases, strict=True
    ):
        try:
            path = raw.decode("utf-8")
            inner = raw[:n_base].decode("utf-8")
        except UnicodeDecodeError as err:
            raise CorruptError(
                f"the name of a data file, {raw[:80]!r}, is not valid UTF-8"
            ) from err
        if n_base > len(raw):
            raise CorruptError(f"the base of the path {path[:80]!r} has {n_base} bytes")
        files.append((base + inner, base + path))
    return files


def _read_locations(
    cursor: _Cursor, n: int, files: list[tuple[str, str]], *, may_be_missing: bool = False
) -> Iterator[ValueLocation | None]:
    """Yield locations; None for a missing one."""
    numbers, offsets, lengths = (cursor.numbers(n) for _ in range(3))
    for number, offset, length in zip(numbers, offsets, lengths, strict=True):
        is_missing = may_be_missing and offset == length == _MISSING
        yield None if is_missing else _location(files, number, offset, length)


def _location(files: list[tuple[str, str]], number: int, offset: int, length: int) -> ValueLocation:
    """Return a location after checking its numbers."""
    if number >= len(files):
        raise CorruptError(f"data file {number} is named, but there are only {len(files)}")
    if offset + length > _MISSING:
        raise CorruptError(f"{length} bytes at byte {offset} are impossible")
    base, path = files[number]
    return ValueLocation(base, path, offset, length)


def unwrap(data: bytes, magic: int, budget: UnfoldBudget) -> bytes:
    """Return the body of a manifest or node, checked and inflated.

    Raises:
        CorruptError, TruncatedError: length, checksum or kind is wrong.
        UnsupportedError: the version or compression is unknown.
        UnsafeError: the body inflates to too much.
    """
    if len(data) < _HEAD_BYTES + 6:
        raise TruncatedError(f"{len(data)} bytes are too few for a node")
    # Check kind, length and checksum before anything else.
    stated_magic, length = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:12], "little")
    if stated_magic != magic:
        raise CorruptError(f"it begins with {stated_magic:#010x}, not {magic:#010x}")
    if length != len(data):
        raise (TruncatedError if length > len(data) else CorruptError)(
            f"it has {len(data)} bytes, but states {length}"
        )
    stated_crc = int.from_bytes(data[-4:], "little")
    crc = crc32c(data[:-4])
    if stated_crc != crc:
        raise CorruptError(
            f"checksum mismatch: its CRC-32C is {crc:08x}, but {stated_crc:08x} is stated"
        )
    # Only then the body.
    version, compression = data[_HEAD_BYTES], data[_HEAD_BYTES + 1]
    if version != 0 or compression > 1:
        raise UnsupportedError(f"version {version} with compression {compression} is not supported")
    body = data[_HEAD_BYTES + 2 : -4]
    if compression:
        return _inflate(body, budget)
    budget.spend(len(body))
    return body


def _inflate(body: bytes, budget: UnfoldBudget) -> bytes:
    """Inflate a body within the budget."""
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(body)
    inflated = bytearray()
    try:
        while piece := reader.read(1 << 16):
            budget.spend(len(piece))
            inflated += piece
            if len(inflated) > MAX_NODE_BYTES:
                raise UnsafeError(f"a node inflates to more than {MAX_NODE_BYTES >> 20} MiB")
    except zstandard.ZstdError as err:
        raise CorruptError(f"the zstd stream is damaged: {err}") from err
    return bytes(inflated)
