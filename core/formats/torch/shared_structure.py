"""Torch zips with the same structure: one is parsed in full, the others are compared with it byte
by byte.

The rank files of a pipeline stage describe equal tensors. Their pickles differ by the ranks'
numbers in the training
arguments, their directories by CRCs::

    model_optim_rng.pt of rank 0     ... 'rank' BININT1 0 ... │ headers │ directory: sizes, offsets, CRCs
    of rank 1                        ... 'rank' BININT1 1 ... │ the same │ the same but for CRCs
                                               └ a hole

So a checkpoint of 1024 files costs a few dozen parses. Nothing is taken on trust: the directory
(apart from CRCs), each local header and the pickle (apart from holes) of each file are read and
compared with those of the file that was parsed and checked. A hole is an integer that stands as a
value in the dict of the training arguments and nowhere else, which parsing the pickle once more
with a name in its place shows. A file that differs in any other way is parsed.

Source: the rank files in tests/golden (``mcore_legacy``) differ in ``rank`` and ``local_rank``
    only.
"""

from __future__ import annotations

import secrets
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pickletools import genops
from typing import TYPE_CHECKING

from core.errors import CheckpointingException
from core.formats.torch.tensors import TensorHooks
from core.formats.torch.tree import TorchTree, parse, stream_kind
from core.formats.torch.zip.container import CENTRAL, Archive, Record, read_archive
from core.formats.torch.zip.records import is_big_endian, read_pickle
from core.pickle.inert import Global, as_mapping, attributes, walk
from core.pickle.reader import gc_paused, load, noting_uses

if TYPE_CHECKING:
    from core.files.store import ReadStore

_SIGNED = 0x4A
_WIDTHS = {0x4B: 1, 0x4D: 2, _SIGNED: 4}
"""BININT1, BININT2 (unsigned) and BININT (signed): bytes of the number behind the opcode."""
_CRC_AT = 16
_MAX_HOLES = 16
_WINDOW_BYTES = 8192
_MAX_PATTERNS = 8
"""Maximum number of patterns of one file size."""


@dataclass(slots=True)
class _Hole:
    """An integer that differs from file to file: the position of its opcode, and the argument that
    it is.
    """

    start: int
    stop: int
    name: str = ""


@dataclass(slots=True)
class FilePattern:
    """A file that was parsed in full, with which others are compared.

    Args:
        file: the file.
        tree: its content; keys without prefix, arrays in ``file``.
        records: the zip's, by name; {} for a stream of before torch 1.6.
        tail: the directory and what follows, cut into its parts: bytes, CRC, bytes, CRC, …, bytes.
    """

    file: str
    tree: TorchTree
    records: Mapping[str, Record] = field(default_factory=dict)
    tail: tuple[object, ...] = ()
    _size: int = 0
    _tail_at: int = 0
    _cutter: struct.Struct | None = None
    _windows: list[tuple[int, int, list[tuple[int, bytes]]]] = field(default_factory=list)
    _pickle_at: int = 0
    _pickle: bytes = b""
    _holes: list[_Hole] = field(default_factory=list)
    _integers: list[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class PatternedFile:
    """The content of a file: that of its pattern, with other numbers.

    Args:
        crcs: record name → CRC-32 from the file's directory; {} for the pattern itself, and if the
            directory was not read.
        arguments: the training arguments that differ from the pattern's.
    """

    pattern: FilePattern
    file: str
    crcs: dict[str, int]
    arguments: dict[str, int]


class PatternedFiles:
    """Reads torch files of which many have the same structure.

    Args:
        store: holds the files.
    """

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._patterns: dict[int, list[FilePattern]] = {}
        self._of_role: dict[tuple[str, int], FilePattern] = {}
        self.n_unopened = 0

    def assumed(self, file: str, role: tuple[str, int]) -> PatternedFile:
        """Return the content of a file, assumed to equal the first file with its role.

        Only that one is opened.

        Args:
            role: purpose and length in bytes of the file; files of one role are assumed to be
                equal.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``tree.parse``.
        """
        if role in self._of_role:
            self.n_unopened += 1
        else:
            self._of_role[role] = self.read(file).pattern
        return PatternedFile(self._of_role[role], file, {}, {})

    def read(self, file: str) -> PatternedFile:
        """Return the content of a file, by comparing it with patterns or by parsing it.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``tree.parse``.
        """
        patterns = self._patterns.setdefault(self._store.size(file), [])
        for pattern in patterns:
            match = self._as(pattern, file)
            if match is not None:
                return match
        with gc_paused():
            pattern = _pattern(self._store, file)
        if pattern.tail and len(patterns) < _MAX_PATTERNS:
            patterns.insert(0, pattern)
        return PatternedFile(pattern, file, {}, {})

    def _as(self, pattern: FilePattern, file: str) -> PatternedFile | None:
        """Return the file's content by a pattern, or None if it differs from the pattern."""
        store = self._store
        assert pattern._cutter is not None
        # The directory must equal the pattern's, but for CRCs.
        tail = store.read(file, pattern._tail_at, pattern._size - pattern._tail_at)
        parts = pattern._cutter.unpack(tail)
        if parts[::2] != pattern.tail[::2]:
            return None
        # So must the local headers and the small records.
        windows = store.read_spans(
            file, [(start, n_bytes) for start, n_bytes, _ in pattern._windows]
        )
        for window, (_, _, wanted) in zip(windows, pattern._windows, strict=True):
            if any(not window.startswith(data, at) for at, data in wanted):
                return None
        # The pickle may differ in holes only.
        arguments = _arguments(pattern, store.read(file, pattern._pickle_at, len(pattern._pickle)))
        if arguments is None:
            return None
        return PatternedFile(
            pattern, file, dict(zip(pattern.records, parts[1::2], strict=True)), arguments
        )


def _pattern(store: ReadStore, file: str) -> FilePattern:
    """Parse a file in full; the pattern has no tail if other files cannot be compared with it."""
    tree = parse(store, file)
    pattern = FilePattern(file, tree)
    if stream_kind(store, file, 0, store.size(file)) != "zip":
        return pattern
    archive = read_archive(store, file)
    pattern.records = archive.records
    # The numbers of deflated or big-endian records do not lie in the file as they are.
    if any(record.packed_bytes is not None for record in archive.records.values()) or is_big_endian(
        store, archive
    ):
        return pattern
    # Keep what is to be compared: pickle, local headers, directory.
    pickle = archive.record("data.pkl")
    pattern._size = store.size(file)
    pattern._pickle_at, pattern._pickle = pickle.offset, read_pickle(store, file, pickle)
    pattern._windows = list(_windows(store, archive))
    _cut_tail(pattern, store, archive)
    return pattern


def _windows(
    store: ReadStore, archive: Archive
) -> Iterator[tuple[int, int, list[tuple[int, bytes]]]]:
    """Yield the local headers and the small records in windows.

    Yields:
        First byte, length in bytes, and [(byte in the window, expected bytes)].
    """
    spans = []
    for (name, record), header in zip(archive.records.items(), archive.headers, strict=True):
        is_literal = name in ("byteorder", "version")
        spans.append((header, record.offset + (record.n_bytes if is_literal else 0)))
    spans.sort()
    group: list[tuple[int, int]] = []
    for span in [*spans, None]:
        if group and (span is None or span[1] - group[0][0] > _WINDOW_BYTES):
            start, n_bytes = group[0][0], group[-1][1] - group[0][0]
            data = store.read(archive.file, start, n_bytes)
            yield (
                start,
                n_bytes,
                [(first - start, data[first - start : stop - start]) for first, stop in group],
            )
            group = []
        if span is not None:
            group.append(span)


def _cut_tail(pattern: FilePattern, store: ReadStore, archive: Archive) -> None:
    """Cut the zip's directory at its CRCs, the only parts in which files with one pattern may
    differ.
    """
    position = 0
    cuts = []
    names = []
    directory = archive.directory
    size = pattern._size - directory
    tail = store.read(archive.file, directory, size)
    # Find every CRC field of the directory.
    for _ in archive.records:
        n_name, n_extra, n_comment = CENTRAL.unpack_from(tail, position)[10:13]
        names.append(
            tail[position + CENTRAL.size : position + CENTRAL.size + n_name]
            .decode()
            .partition("/")[2]
        )
        cuts.append(position + _CRC_AT)
        position += CENTRAL.size + n_name + n_extra + n_comment
    if names != list(archive.records):
        return  # directories as entries, as other zip programs add them
    # Build a struct that separates the CRCs from the bytes between them.
    code = []
    before = 0
    for cut in cuts:
        code.append(f"{cut - before}sI")
        before = cut + 4
    pattern._cutter = struct.Struct("<" + "".join(code) + f"{size - before}s")
    pattern._tail_at = directory
    pattern.tail = pattern._cutter.unpack(tail)


def _arguments(pattern: FilePattern, pickle: bytes) -> dict[str, int] | None:
    """Return the arguments in which a pickle differs from the pattern's.

    None if it differs otherwise.
    """
    # Each round compares everything but the holes; a difference becomes a hole, or ends the
    # comparison.
    while True:
        before = 0
        differs_at = None
        for hole in [*pattern._holes, None]:
            stop = len(pickle) if hole is None else hole.start + 1
            if pickle[before:stop] != pattern._pickle[before:stop]:
                differs_at = _first_difference(pickle, pattern._pickle, before, stop)
                break
            if hole is not None:
                before = hole.stop
        if differs_at is None:
            return {
                hole.name: int.from_bytes(
                    pickle[hole.start + 1 : hole.stop],
                    "little",
                    signed=pickle[hole.start] == _SIGNED,
                )
                for hole in pattern._holes
            }
        if not _add_hole(pattern, differs_at):
            return None


def _first_difference(pickle: bytes, expected: bytes, start: int, stop: int) -> int:
    """Return the first byte from ``start`` in which two pickles differ.

    They differ before ``stop``.
    """
    while stop - start > 1:
        middle = (start + stop) // 2
        if pickle[start:middle] != expected[start:middle]:
            stop = middle
        else:
            start = middle
    return start


def _add_hole(pattern: FilePattern, position: int) -> bool:
    """Turn the integer at a byte of the pattern's pickle into a hole, if it is a training
    argument.
    """
    if pattern._integers is None:
        pattern._integers = _integers(pattern._pickle)
    number = bisect_right(pattern._integers, (position, 0)) - 1
    if number < 0 or len(pattern._holes) >= _MAX_HOLES:
        return False
    start, stop = pattern._integers[number]
    if not start < position < stop:
        return False
    name = _argument_at(pattern._pickle, start, stop, file=pattern.file)
    if name is None or any(hole.name == name for hole in pattern._holes):
        return False
    pattern._holes = sorted(
        [*pattern._holes, _Hole(start, stop, name)], key=lambda hole: hole.start
    )
    return True


def _integers(pickle: bytes) -> list[tuple[int, int]]:
    """Return (opcode, end) of the integers of fixed length in a pickle that was read before."""
    spans = []
    for opcode, _, start in genops(pickle):
        width = _WIDTHS.get(ord(opcode.code))
        if width is not None and start is not None:
            spans.append((start, start + 1 + width))
    return spans


def _argument_at(pickle: bytes, start: int, stop: int, *, file: str) -> str | None:
    """Return the name of the training argument whose value stands at some bytes of a pickle.

    None if the value is not that of an argument, or stands elsewhere too.
    """
    # Parse the pickle with an unguessable name in place of the number, and see where it ends up.
    mark = Global(
        f"hole_{secrets.token_hex(16)}", "here"
    )  # nobody can have written that name into the file
    marked = pickle[:start] + f"c{mark.module}\n{mark.name}\n".encode() + pickle[stop:]
    try:
        with noting_uses(passes_on=False):  # the mark is none of the file's names
            root = load(marked, label=file, hooks=TensorHooks().hooks)
    except CheckpointingException:
        return None
    fields = attributes((as_mapping(root) or {}).get("args")) or {}
    names = [name for name, value in fields.items() if value == mark]
    n_marks = sum(1 for node in walk(root) if type(node) is Global and node == mark)
    return names[0] if len(names) == 1 and n_marks == 1 else None
