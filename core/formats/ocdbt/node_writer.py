"""Writing the manifest and the nodes of an OCDBT database, the inverse of ``nodes``.

The byte pictures are those of ``core.formats.ocdbt.nodes``. Bodies are not compressed, keys in a
node are complete, and the manifest lists one version. Nothing depends on the time or on chance:
equal entries give equal bytes.

Source: tensorstore's documentation of the ocdbt driver (storage format); what is written is opened
    by tensorstore 0.1.86.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from core.arrays.checksum import crc32c
from core.formats.ocdbt.nodes import MANIFEST_MAGIC, NODE_MAGIC, ValueLocation
from core.values import dataclass

ValueT = TypeVar("ValueT")
_MAX_NODE_BYTES = 256 << 10
"""Approximate size at which the next node is started."""
_ENTRY_BYTES = 24
"""Generous size of the numbers of an entry."""
_MAX_INLINE_BYTES = 1024
_MAX_DECODED_BYTES = 100_000_000
_VERSION_TREE_ARITY_LOG2 = 4
"""The settings that Orbax writes into the manifest, for programs that change the database."""


@dataclass(frozen=True, slots=True)
class _NodeSummary:
    """A written node, as its parent lists it.

    Args:
        first_key: its smallest key.
        location: its position.
        n_keys, tree_bytes, value_bytes: keys below it, size of all nodes below it including
            itself, and size of all values below it that are in data files.
    """

    first_key: bytes
    location: ValueLocation
    n_keys: int
    tree_bytes: int
    value_bytes: int


def encode_database(
    entries: Mapping[str, bytes | ValueLocation], *, file: str
) -> tuple[bytes, bytes]:
    """Encode a database as the content of one file of nodes and of the manifest.

    Args:
        entries: value of each key, or its location in a data file. At least one.
        file: path of the file of nodes, relative to the database.

    Returns:
        The content of the file of nodes, and that of ``manifest.ocdbt``.
    """
    out = bytearray()

    def place(body: bytes) -> ValueLocation:
        node = _wrap(body, NODE_MAGIC)
        location = ValueLocation("", file, len(out), len(node))
        out.extend(node)
        return location

    # The leaves first, then one level of interior nodes above another until there is a root.
    rows = sorted((key.encode(), value) for key, value in entries.items())
    level: list[_NodeSummary] = []
    for group in _groups(rows):
        value_bytes = sum(v.n_bytes for _, v in group if isinstance(v, ValueLocation))
        location = place(_leaf_body(group))
        level.append(_NodeSummary(group[0][0], location, len(group), location.n_bytes, value_bytes))
    height = 0
    while len(level) > 1:
        height += 1
        parents = []
        for children in _groups([(child.first_key, child) for child in level]):
            nodes = [child for _, child in children]
            location = place(_interior_body(nodes, height))
            parents.append(
                _NodeSummary(
                    nodes[0].first_key,
                    location,
                    sum(node.n_keys for node in nodes),
                    sum(node.tree_bytes for node in nodes) + location.n_bytes,
                    sum(node.value_bytes for node in nodes),
                )
            )
        level = parents
    return bytes(out), _manifest(level[0], height, uuid=hashlib.blake2b(out, digest_size=16))


def _groups(rows: Sequence[tuple[bytes, ValueT]]) -> Iterator[list[tuple[bytes, ValueT]]]:
    """Yield consecutive entries, at least two except at the end, that fit into a node."""
    group: list[tuple[bytes, ValueT]] = []
    n_bytes = 0
    for key, value in rows:
        size = len(key) + _ENTRY_BYTES + (len(value) if isinstance(value, bytes) else 0)
        if len(group) > 1 and n_bytes + size > _MAX_NODE_BYTES:
            yield group
            group, n_bytes = [], 0
        group.append((key, value))
        n_bytes += size
    yield group


def _leaf_body(rows: Sequence[tuple[bytes, bytes | ValueLocation]]) -> bytes:
    """Encode a leaf."""
    located = [value for _, value in rows if isinstance(value, ValueLocation)]
    files = _file_numbers(located)
    inline = [value for _, value in rows if isinstance(value, bytes)]
    return b"".join(
        (
            b"\x00",
            _file_table(files),
            _varint(len(rows)),
            _string_lengths([key for key, _ in rows]),
            *_suffixes([key for key, _ in rows]),
            _varints(
                value.n_bytes if isinstance(value, ValueLocation) else len(value)
                for _, value in rows
            ),
            _varints(int(isinstance(value, ValueLocation)) for _, value in rows),
            _varints(files[value.path] for value in located),
            _varints(value.offset for value in located),
            *inline,
        )
    )


def _interior_body(nodes: Sequence[_NodeSummary], height: int) -> bytes:
    """Encode an interior node; the keys of its children are complete (common prefix 0)."""
    files = _file_numbers([node.location for node in nodes])
    keys = [node.first_key for node in nodes]
    return b"".join(
        (
            bytes((height,)),
            _file_table(files),
            _varint(len(nodes)),
            _string_lengths(keys),
            _varints(0 for _ in nodes),
            *_suffixes(keys),
            _location_columns(nodes, files),
            _statistics(nodes),
        )
    )


def _manifest(root: _NodeSummary, height: int, *, uuid: hashlib.blake2b) -> bytes:
    """Encode a manifest with one version."""
    files = _file_numbers([root.location])
    body = b"".join(
        (
            uuid.digest(),
            _varint(0),  # kind: single
            _varints((_MAX_INLINE_BYTES, _MAX_DECODED_BYTES)),
            bytes((_VERSION_TREE_ARITY_LOG2,)),
            _varint(0),  # nodes are not compressed
            _file_table(files),
            _varint(1),
            _varint(1),  # generation
            bytes((height,)),
            _location_columns([root], files),
            _statistics([root]),
            bytes(8),  # time of the commit
            _varint(0),  # no older versions
        )
    )
    return _wrap(body, MANIFEST_MAGIC)


def _wrap(body: bytes, magic: int) -> bytes:
    """Add header and checksum to the body of a manifest or node."""
    length = 4 + 8 + 2 + len(body) + 4
    data = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + b"\x00\x00" + body
    return data + crc32c(data).to_bytes(4, "little")


def _file_numbers(locations: Iterable[ValueLocation]) -> dict[str, int]:
    """Return path → number, in the order of the paths."""
    paths = sorted({location.path for location in locations})
    return {path: number for number, path in enumerate(paths)}


def _file_table(files: Mapping[str, int]) -> bytes:
    """Encode the table of data files; all paths are relative to the database (base length 0)."""
    if not files:
        return _varint(0)
    paths = [path.encode() for path in files]
    return b"".join(
        (
            _varint(len(paths)),
            _string_lengths(paths),
            _varints(0 for _ in paths),
            *_suffixes(paths),
        )
    )


def _location_columns(nodes: Sequence[_NodeSummary], files: Mapping[str, int]) -> bytes:
    """Encode file numbers, offsets and lengths, column by column."""
    return b"".join(
        (
            _varints(files[node.location.path] for node in nodes),
            _varints(node.location.offset for node in nodes),
            _varints(node.location.n_bytes for node in nodes),
        )
    )


def _statistics(nodes: Sequence[_NodeSummary]) -> bytes:
    """Encode the three columns of statistics."""
    return b"".join(
        (
            _varints(node.n_keys for node in nodes),
            _varints(node.tree_bytes for node in nodes),
            _varints(node.value_bytes for node in nodes),
        )
    )


def _shared_lengths(texts: Sequence[bytes]) -> list[int]:
    """Return how many bytes each string but the first one shares with the previous one."""
    lengths = []
    for previous, text in pairwise(texts):
        n = 0
        for a, b in zip(previous, text, strict=False):
            if a != b:
                break
            n += 1
        lengths.append(n)
    return lengths


def _string_lengths(texts: Sequence[bytes]) -> bytes:
    """Encode the lengths of the shared prefixes, then those of the rest of each string."""
    shared = _shared_lengths(texts)
    rest = (len(text) - n for text, n in zip(texts, (0, *shared), strict=True))
    return _varints(shared) + _varints(rest)


def _suffixes(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield each string without the prefix that it shares with the previous one."""
    for text, n in zip(texts, (0, *_shared_lengths(texts)), strict=True):
        yield text[n:]


def _varints(numbers: Iterable[int]) -> bytes:
    """Encode numbers one after another."""
    return b"".join(map(_varint, numbers))


def _varint(number: int) -> bytes:
    """Encode a number as LEB128: seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
