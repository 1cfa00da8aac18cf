"""Manifest and nodes of an OCDBT database: bytes to plain values, checked.

::

    manifest, node = magic (u32 big-endian) · length (u64) · version, compression (varints) · body · CRC-32C (u32)

    manifest body:   uuid · kind · max_inline · max_decoded · arity · compression (level) · files · versions · …
    versions:        count · generations · root heights · file numbers · offsets · lengths · statistics · commit times
    B-tree node body: height · files · count · entries
      leaf entries:     key prefix lengths · key suffix lengths · suffixes · value lengths · kinds · file numbers ·
                        offsets · inline values
      interior entries: key prefix lengths · key suffix lengths · common prefix lengths · suffixes · file numbers ·
                        offsets · lengths · statistics
    files:           count · path prefix lengths · path suffix lengths · base lengths · suffixes

Everything repeated is stored column by column, numbers as LEB128 varints, keys and paths without the prefix that they
share with the one before. Such tables and zstd can stand for far more than they take; a ``Budget`` bounds what one
database may unfold to.

Versions: version 0 of the manifest and of the nodes, bodies uncompressed or zstd.

Not supported, refused by name: manifests of the kind ``numbered``.

Source: tensorstore's documentation of the ocdbt driver (storage format); databases written by tensorstore 0.1.86.
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


class Budget:
    """How much the nodes of one database may unfold to.

    Args:
        n_bytes: to begin with.

    Every stored byte of the tree adds ``ratio`` bytes, once; every byte that it unfolds to takes one.
    """

    def __init__(self, n_bytes: int = 16 << 20, *, ratio: int = 64) -> None:
        self._left = n_bytes
        self._ratio = ratio

    def earn(self, n_stored: int) -> None:
        """So many bytes are read for the first time."""
        self._left += self._ratio * n_stored

    def spend(self, n_bytes: int) -> None:
        """So many bytes are about to be made.

        Raises:
            UnsafeError: that is too much for what has been read.
        """
        self._left -= n_bytes
        if self._left < 0:
            raise UnsafeError(
                "the database unfolds to far more than its files hold",
                hint="do not trust this checkpoint; ask where it came from",
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a data file.

    Args:
        base: what the paths inside a node at this place are relative to; "" or ends with "/".
        path: of the file, relative to the database.
        offset, n_bytes: which bytes.
    """

    base: str
    path: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is needed of a manifest: the newest version.

    Args:
        root: where the root node lies; None for a database without entries.
        height: of the root, 0 for a leaf.
        n_keys: entries of the tree, as stated.
    """

    root: Place | None
    height: int
    n_keys: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a node.

    Args:
        key: relative to the node's prefix.
        value: bytes in the node, or where they lie; of an interior node always the child's place.
        n_common: bytes of ``key`` with which all keys of the child begin; 0 in a leaf.
    """

    key: bytes
    value: bytes | Place
    n_common: int = 0


class _Cursor:
    """Reads a body from begin to end."""

    def __init__(self, data: bytes, budget: Budget) -> None:
        self._data = data
        self._at = 0
        self.budget = budget

    def take(self, n_bytes: int) -> bytes:
        found = self._data[self._at : self._at + n_bytes]
        if len(found) != n_bytes:
            raise CorruptError(f"it ends {n_bytes - len(found)} bytes too early")
        self._at += n_bytes
        return found

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """A varint below 2⁶⁴."""
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
        """The number of items that follow, each of which takes a byte at least."""
        n = self.number()
        if n > len(self._data) - self._at:
            raise CorruptError(f"{n} items are announced, but only {len(self._data) - self._at} bytes follow")
        return n

    def numbers(self, n: int) -> list[int]:
        return [self.number() for _ in range(n)]

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptError(f"{len(self._data) - self._at} bytes follow its end")


def read_manifest(data: bytes, budget: Budget) -> Manifest:
    """The newest version that a manifest names.

    Args:
        data: the whole file.

    Raises:
        CorruptError, TruncatedError: damaged.
        UnsupportedError: a version, compression or kind that is not handled.
        UnsafeError: it unfolds to too much.
    """
    cursor = _Cursor(unwrapped(data, MANIFEST_MAGIC, budget), budget)
    cursor.take(16)
    if cursor.number() != 0:
        raise UnsupportedError("a manifest of the kind 'numbered'", hint="write the database again as a single one")
    cursor.numbers(2)
    cursor.byte()
    compression = cursor.number()
    if compression > 1:
        raise UnsupportedError(f"the compression method {compression} is not known")
    cursor.take(4 * compression)
    files = _files(cursor, base="")
    n = cursor.count()
    if n == 0:
        return Manifest(None, 0, 0)
    cursor.numbers(n)
    heights = cursor.take(n)
    places = list(_places(cursor, n, files, may_be_missing=True))
    n_keys = cursor.numbers(n)[-1]
    return Manifest(places[-1], heights[-1], n_keys)


def read_node(data: bytes, place: Place, height: int, budget: Budget) -> list[Entry]:
    """The entries of a B-tree node, in the order of their keys.

    Args:
        data: the whole node.
        place: where it lies.
        height: what its parent says.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``read_manifest``.
    """
    cursor = _Cursor(unwrapped(data, NODE_MAGIC, budget), budget)
    found = cursor.byte()
    if found != height:
        raise CorruptError(f"the node says that it has height {found}, its parent {height}")
    files = _files(cursor, base=place.base)
    n = cursor.count()
    if n == 0:
        raise CorruptError("the node has no entries")
    entries = list(_interior(cursor, n, files) if height else _leaf(cursor, n, files))
    cursor.end()
    for one, two in pairwise(entries):
        if one.key >= two.key:
            raise CorruptError(f"the keys are not in order: {one.key[:80]!r}, {two.key[:80]!r}")
    return entries


def _leaf(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[Entry]:
    keys = list(_texts(cursor, cursor.numbers(n - 1), cursor.numbers(n), limit=_MAX_KEY_BYTES))
    lengths = cursor.numbers(n)
    kinds = cursor.numbers(n)
    if set(kinds) - {0, 1}:
        raise CorruptError(f"a value of the kind {max(kinds)}")
    indirect = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    numbers = cursor.numbers(len(indirect))
    offsets = cursor.numbers(len(indirect))
    places = iter([_place(files, *row) for row in zip(numbers, offsets, indirect, strict=True)])
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        yield Entry(key, next(places) if kind else cursor.take(length))


def _interior(cursor: _Cursor, n: int, files: list[tuple[str, str]]) -> Iterator[Entry]:
    prefixes, suffixes = cursor.numbers(n - 1), cursor.numbers(n)
    commons = cursor.numbers(n)
    keys = list(_texts(cursor, prefixes, suffixes, limit=_MAX_KEY_BYTES))
    places = list(_places(cursor, n, files))
    cursor.numbers(3 * n)
    for key, place, n_common in zip(keys, places, commons, strict=True):
        if n_common > len(key):
            raise CorruptError(f"{n_common} bytes of the key {key[:80]!r} are said to be common")
        assert place is not None
        yield Entry(key, place, n_common)


def _texts(cursor: _Cursor, prefixes: list[int], suffixes: list[int], *, limit: int) -> Iterator[bytes]:
    """Prefix-compressed byte strings."""
    last = b""
    for n_prefix, n_suffix in zip((0, *prefixes), suffixes, strict=True):
        if n_prefix > len(last):
            raise CorruptError(f"an entry shares {n_prefix} bytes with one of {len(last)} bytes")
        if n_prefix + n_suffix > limit:
            raise CorruptError(f"a name of {n_prefix + n_suffix} bytes")
        cursor.budget.spend(n_prefix + n_suffix + 64)
        last = last[:n_prefix] + cursor.take(n_suffix)
        yield last


def _files(cursor: _Cursor, *, base: str) -> list[tuple[str, str]]:
    """(base of what lies in it, path) of every data file, relative to the database."""
    n = cursor.count()
    if n == 0:
        return []
    prefixes, suffixes, bases = cursor.numbers(n - 1), cursor.numbers(n), cursor.numbers(n)
    found = []
    for raw, n_base in zip(_texts(cursor, prefixes, suffixes, limit=_MAX_PATH_BYTES), bases, strict=True):
        try:
            path = raw.decode("utf-8")
            inner = raw[:n_base].decode("utf-8")
        except UnicodeDecodeError as err:
            raise CorruptError(f"a data file is called {raw[:80]!r}") from err
        if n_base > len(raw):
            raise CorruptError(f"the base of the path {path[:80]!r} has {n_base} bytes")
        found.append((base + inner, base + path))
    return found


def _places(
    cursor: _Cursor, n: int, files: list[tuple[str, str]], *, may_be_missing: bool = False
) -> Iterator[Place | None]:
    numbers, offsets, lengths = (cursor.numbers(n) for _ in range(3))
    for number, offset, length in zip(numbers, offsets, lengths, strict=True):
        is_missing = may_be_missing and offset == length == _MISSING
        yield None if is_missing else _place(files, number, offset, length)


def _place(files: list[tuple[str, str]], number: int, offset: int, length: int) -> Place:
    if number >= len(files):
        raise CorruptError(f"data file {number} of {len(files)} is named")
    if offset + length > _MISSING:
        raise CorruptError(f"{length} bytes at byte {offset} cannot be")
    base, path = files[number]
    return Place(base, path, offset, length)


def unwrapped(data: bytes, magic: int, budget: Budget) -> bytes:
    """The body of a manifest or node, checked and inflated.

    Raises:
        CorruptError, TruncatedError: another length, checksum or kind than it should have.
        UnsupportedError: a version or compression that is not known.
        UnsafeError: it inflates to too much.
    """
    if len(data) < _HEAD_BYTES + 6:
        raise TruncatedError(f"{len(data)} bytes are too few for a node")
    found, length = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:12], "little")
    if found != magic:
        raise CorruptError(f"it begins with {found:#010x}, not {magic:#010x}")
    if length != len(data):
        raise (TruncatedError if length > len(data) else CorruptError)(f"it has {len(data)} bytes, but says {length}")
    stated = int.from_bytes(data[-4:], "little")
    summed = crc32c(data[:-4])
    if stated != summed:
        raise CorruptError(f"its CRC-32C is {summed:08x}, but {stated:08x} is stated")
    version, compression = data[_HEAD_BYTES], data[_HEAD_BYTES + 1]
    if version != 0 or compression > 1:
        raise UnsupportedError(f"version {version} with compression {compression} is not known")
    body = data[_HEAD_BYTES + 2 : -4]
    if compression:
        return _inflated(body, budget)
    budget.spend(len(body))
    return body


def _inflated(body: bytes, budget: Budget) -> bytes:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(body)
    made = bytearray()
    try:
        while piece := reader.read(1 << 16):
            budget.spend(len(piece))
            made += piece
            if len(made) > MAX_NODE_BYTES:
                raise UnsafeError(f"a node inflates to more than {MAX_NODE_BYTES >> 20} MiB")
    except zstandard.ZstdError as err:
        raise CorruptError(f"the zstd stream is damaged: {err}") from err
    return bytes(made)
