"""Torch zips that say the same: read in full once, then compared byte by byte.

The rank files of a pipeline stage describe equal tensors. Their pickles differ by the ranks' numbers in the training
arguments, their directories by CRCs::

    model_optim_rng.pt of rank 0     ... 'rank' BININT1 0 ... │ headers │ directory: sizes, offsets, CRCs
    of rank 1                        ... 'rank' BININT1 1 ... │ the same │ the same but for CRCs
                                               └ a hole

So a checkpoint of 1024 files costs a few dozen parses. Nothing is taken on trust: the directory (apart from CRCs), each
local header and the pickle (apart from holes) of each file are read and compared with those of the file that was
parsed and checked. A hole is an integer that stands as a value in the dict of the training arguments and nowhere else,
which parsing the pickle once more with a name in its place shows. A file that differs in any other way is parsed.

Source: the rank files in tests/golden (``mcore_legacy``) differ in ``rank`` and ``local_rank`` only.
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
from core.formats.torch.tensors import TensorReader
from core.formats.torch.tree import TorchTree, parse, stream_kind
from core.formats.torch.zip.container import CENTRAL, Archive, Record, read_archive
from core.formats.torch.zip.records import is_big_endian, read_pickle
from core.pickle.inert import Global, as_mapping, attributes, walk
from core.pickle.reader import gc_paused, load, noting_uses

if TYPE_CHECKING:
    from core.files.store import ReadStore

_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
"""BININT1, BININT2 (unsigned) and BININT (signed): bytes of the number behind the opcode."""
_CRC_AT = 16
_MAX_HOLES = 16
_WINDOW_BYTES = 8192
_MAX_PATTERNS = 8
"""Of one file size."""


@dataclass(slots=True)
class _Hole:
    """An integer that differs from file to file: where its opcode is, and which argument it is."""

    start: int
    stop: int
    name: str = ""


@dataclass(slots=True)
class Pattern:
    """A file that was parsed in full.

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
class Alike:
    """The content of a file: that of its pattern, with other numbers.

    Args:
        crcs: record name → CRC-32 that its directory states; {} for the pattern itself, and where it was not read.
        arguments: those of the training arguments that are other than the pattern's.
    """

    pattern: Pattern
    file: str
    crcs: dict[str, int]
    arguments: dict[str, int]


class AlikeFiles:
    """Reads torch files of which many are alike.

    Args:
        store: where they are.
    """

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._patterns: dict[int, list[Pattern]] = {}
        self._of_role: dict[tuple[str, int], Pattern] = {}
        self.n_unopened = 0

    def assumed(self, file: str, role: tuple[str, int]) -> Alike:
        """The content of a file, taken to be that of the first one with its role; only that one is opened.

        Args:
            role: what the file is for, and its length in bytes.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``torch_tree.parse``.
        """
        if role in self._of_role:
            self.n_unopened += 1
        else:
            self._of_role[role] = self.read(file).pattern
        return Alike(self._of_role[role], file, {}, {})

    def read(self, file: str) -> Alike:
        """The content of a file.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``torch_tree.parse``.
        """
        known = self._patterns.setdefault(self._store.size(file), [])
        for pattern in known:
            found = self._as(pattern, file)
            if found is not None:
                return found
        with gc_paused():
            pattern = _pattern(self._store, file)
        if pattern.tail and len(known) < _MAX_PATTERNS:
            known.insert(0, pattern)
        return Alike(pattern, file, {}, {})

    def _as(self, pattern: Pattern, file: str) -> Alike | None:
        """The file's content by the pattern, or None if it is not alike."""
        store = self._store
        assert pattern._cutter is not None
        tail = store.read(file, pattern._tail_at, pattern._size - pattern._tail_at)
        parts = pattern._cutter.unpack(tail)
        if parts[::2] != pattern.tail[::2]:
            return None
        windows = store.read_spans(file, [(start, n_bytes) for start, n_bytes, _ in pattern._windows])
        for window, (_, _, wanted) in zip(windows, pattern._windows, strict=True):
            if any(not window.startswith(data, at) for at, data in wanted):
                return None
        arguments = _arguments(pattern, store.read(file, pattern._pickle_at, len(pattern._pickle)))
        if arguments is None:
            return None
        return Alike(pattern, file, dict(zip(pattern.records, parts[1::2], strict=True)), arguments)


def _pattern(store: ReadStore, file: str) -> Pattern:
    """A file parsed in full; without a tail if others are not to be compared with it."""
    tree = parse(store, file)
    pattern = Pattern(file, tree)
    if stream_kind(store, file, 0, store.size(file)) != "zip":
        return pattern
    archive = read_archive(store, file)
    pattern.records = archive.records
    if any(record.packed_bytes is not None for record in archive.records.values()) or is_big_endian(store, archive):
        return pattern
    pickle = archive.record("data.pkl")
    pattern._size = store.size(file)
    pattern._pickle_at, pattern._pickle = pickle.offset, read_pickle(store, file, pickle)
    pattern._windows = list(_windows(store, archive))
    _cut_tail(pattern, store, archive)
    return pattern


def _windows(store: ReadStore, archive: Archive) -> Iterator[tuple[int, int, list[tuple[int, bytes]]]]:
    """(first byte, length, [(byte in it, bytes that stand there)]) of all local headers and the small records."""
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
            yield start, n_bytes, [(a - start, data[a - start : b - start]) for a, b in group]
            group = []
        if span is not None:
            group.append(span)


def _cut_tail(pattern: Pattern, store: ReadStore, archive: Archive) -> None:
    """Cuts the directory at its CRCs."""
    at = 0
    cuts = []
    names = []
    directory = archive.directory
    size = pattern._size - directory
    tail = store.read(archive.file, directory, size)
    for _ in archive.records:
        n, n_extra, n_comment = CENTRAL.unpack_from(tail, at)[10:13]
        names.append(tail[at + CENTRAL.size : at + CENTRAL.size + n].decode().partition("/")[2])
        cuts.append(at + _CRC_AT)
        at += CENTRAL.size + n + n_extra + n_comment
    if names != list(archive.records):
        return  # directories as entries, as other zip programs add them
    code = []
    before = 0
    for cut in cuts:
        code.append(f"{cut - before}sI")
        before = cut + 4
    pattern._cutter = struct.Struct("<" + "".join(code) + f"{size - before}s")
    pattern._tail_at = directory
    pattern.tail = pattern._cutter.unpack(tail)


def _arguments(pattern: Pattern, pickle: bytes) -> dict[str, int] | None:
    """The arguments in which a pickle differs from the pattern's; None if it differs otherwise."""
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
            return {hole.name: _integer(pickle, hole) for hole in pattern._holes}
        if not _add_hole(pattern, differs_at):
            return None


def _first_difference(one: bytes, other: bytes, start: int, stop: int) -> int:
    """The first byte from ``start`` in which the two differ; there is one before ``stop``."""
    while stop - start > 1:
        middle = (start + stop) // 2
        if one[start:middle] != other[start:middle]:
            stop = middle
        else:
            start = middle
    return start


def _integer(pickle: bytes, hole: _Hole) -> int:
    return int.from_bytes(pickle[hole.start + 1 : hole.stop], "little", signed=pickle[hole.start] == 0x4A)


def _add_hole(pattern: Pattern, place: int) -> bool:
    """Makes the integer at a byte of the pattern's pickle a hole, if it is an argument and nothing else."""
    if pattern._integers is None:
        pattern._integers = _integers(pattern._pickle)
    number = bisect_right(pattern._integers, (place, 0)) - 1
    if number < 0 or len(pattern._holes) >= _MAX_HOLES:
        return False
    start, stop = pattern._integers[number]
    if not start < place < stop:
        return False
    name = _argument_at(pattern._pickle, start, stop, file=pattern.file)
    if name is None or any(hole.name == name for hole in pattern._holes):
        return False
    pattern._holes = sorted([*pattern._holes, _Hole(start, stop, name)], key=lambda hole: hole.start)
    return True


def _integers(pickle: bytes) -> list[tuple[int, int]]:
    """(opcode, end) of the integers of fixed length in a pickle that was read before."""
    found = []
    for opcode, _, at in genops(pickle):
        width = _WIDTHS.get(ord(opcode.code))
        if width is not None and at is not None:
            found.append((at, at + 1 + width))
    return found


def _argument_at(pickle: bytes, start: int, stop: int, *, file: str) -> str | None:
    """The name of the training argument whose value stands at some bytes of a pickle, if it stands nowhere else."""
    mark = Global(f"hole_{secrets.token_hex(16)}", "here")  # nobody can have written that name into the file
    marked = pickle[:start] + f"c{mark.module}\n{mark.name}\n".encode() + pickle[stop:]
    try:
        with noting_uses(passes_on=False):  # the mark is none of the file's names
            root = load(marked, label=file, hooks=TensorReader().hooks)
    except CheckpointingException:
        return None
    fields = attributes((as_mapping(root) or {}).get("args")) or {}
    names = [name for name, value in fields.items() if value == mark]
    n_marks = sum(1 for node in walk(root) if type(node) is Global and node == mark)
    return names[0] if len(names) == 1 and n_marks == 1 else None
