"""Torch zips of equal structure: one is parsed, the others are compared with it byte by byte.

The rank files of a pipeline stage describe equal tensors. Their pickles differ by the ranks'
numbers in the training arguments, their directories by CRCs::

    file of rank 0     … 'rank' BININT1 0 … │ headers │ directory: sizes, offsets, CRCs
    file of rank 1     … 'rank' BININT1 1 … │ equal   │ equal, except for the CRCs
                                 └ a hole

So a checkpoint of 1024 files costs a few dozen parses. All files are checked equally: the directory
(except for the CRCs), each local header and the pickle (except for holes) of each file are read and
compared with those of the file that was parsed. A hole is an integer that occurs as the value of
one training argument and nowhere else. To prove that, the pickle is parsed once more with a name in
place of the integer. A file that differs in any other way is parsed.

Source: the rank files in tests/golden (``mcore_legacy``) differ in ``rank`` and ``local_rank``
    only.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from core.errors import CheckpointingException
from core.formats.torch.tensors import TensorHooks
from core.formats.torch.tree import TorchTree, parse, stream_kind
from core.formats.torch.zip.container import CENTRAL, Archive, Record, read_archive
from core.formats.torch.zip.records import is_big_endian, read_pickle
from core.pickle.inert import Global, as_mapping, attributes, walk
from core.pickle.noted import gc_paused, noting_uses
from core.pickle.reader import load
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_SIGNED = 0x4A
_WIDTHS = {0x4B: 1, 0x4D: 2, _SIGNED: 4}
"""BININT1, BININT2 (unsigned) and BININT (signed) → bytes of the number after the opcode."""
_CRC_AT = 16
"""Offset of the CRC in an entry of the directory."""
_MAX_HOLES = 16
_WINDOW_BYTES = 8192
"""Bytes of a file that are read at once to compare local headers."""
_MAX_PATTERNS = 8
"""Maximum number of patterns that are kept per file size."""


@dataclass(slots=True)
class _Hole:
    """An integer in a pickle that differs from file to file.

    Args:
        start, stop: its bytes in the pickle, opcode included.
        name: the training argument whose value it is.
    """

    start: int
    stop: int
    name: str = ""


@dataclass(slots=True)
class FilePattern:
    """A file that was parsed completely, with which others are compared.

    Args:
        file: name of the file.
        tree: its content; keys without prefix, arrays in ``file``.
        records: the zip's records, by name; {} for a stream from before torch 1.6.
        tail: the directory and the end records, cut at the CRCs: bytes, CRC, bytes, CRC, …, bytes;
            () if other files cannot be compared with this one.
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


@dataclass(frozen=True, slots=True)
class PatternedFile:
    """The content of a file: that of its pattern, with other CRCs and training arguments.

    Args:
        crcs: record name → CRC-32 from the file's directory; {} for the pattern itself, and if the
            directory was not read.
        arguments: values of the training arguments that may differ from the pattern's.
    """

    pattern: FilePattern
    file: str
    crcs: dict[str, int]
    arguments: dict[str, int]


class PatternedFiles:
    """Reads torch files of which many have the same structure.

    Attributes:
        n_unopened: number of files whose content was assumed.
    """

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._patterns: dict[int, list[FilePattern]] = {}
        """File size → patterns, the most recent first."""
        self._of_role: dict[tuple[str, int], FilePattern] = {}
        self.n_unopened = 0

    def assume(self, file: str, role: tuple[str, int]) -> PatternedFile:
        """Return the content of a file, assumed to equal the first file with its role.

        Only the first file of a role is opened.

        Args:
            role: purpose and length in bytes of the file.

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
            match = self._match(pattern, file)
            if match is not None:
                return match
        with gc_paused():
            pattern = _parse_pattern(self._store, file)
        if pattern.tail and len(patterns) < _MAX_PATTERNS:
            patterns.insert(0, pattern)
        return PatternedFile(pattern, file, {}, {})

    def _match(self, pattern: FilePattern, file: str) -> PatternedFile | None:
        """Compare a file with a pattern; return its content, or None if it differs."""
        store = self._store
        assert pattern._cutter is not None
        # The directory must equal the pattern's, except for the CRCs.
        tail = store.read(file, pattern._tail_at, pattern._size - pattern._tail_at)
        parts = pattern._cutter.unpack(tail)
        if parts[::2] != pattern.tail[::2]:
            return None
        # The local headers and the small records must be equal. Remotely they would be a request
        # each; the directory and the pickle suffice, and the CRCs of the data are checked later.
        windows = store.read_spans(
            file, [(start, n_bytes) for start, n_bytes, _ in pattern._windows]
        )
        for window, (_, _, wanted) in zip(windows, pattern._windows, strict=True):
            if any(not window.startswith(data, at) for at, data in wanted):
                return None
        # The pickle may differ in holes only.
        pickle = store.read(file, pattern._pickle_at, len(pattern._pickle))
        arguments = _compare_pickle(pattern, pickle)
        if arguments is None:
            return None
        crcs = dict(zip(pattern.records, parts[1::2], strict=True))
        return PatternedFile(pattern, file, crcs, arguments)


def _parse_pattern(store: ReadStore, file: str) -> FilePattern:
    """Parse a file completely; the pattern has no tail if other files cannot be compared with it.

    Raises:
        CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``tree.parse``.
    """
    tree = parse(store, file)
    pattern = FilePattern(file, tree)
    if stream_kind(store, file, 0, store.size(file)) != "zip":
        return pattern
    archive = read_archive(store, file)
    pattern.records = archive.records
    # Deflated or big-endian records must be decoded, which is not done for files that match.
    is_deflated = any(record.packed_bytes is not None for record in archive.records.values())
    if is_deflated or is_big_endian(store, archive):
        return pattern
    # Keep the bytes to compare: pickle, local headers, directory.
    pickle = archive.record("data.pkl")
    pattern._size = store.size(file)
    pattern._pickle_at, pattern._pickle = pickle.offset, read_pickle(store, file, pickle)
    pattern._windows = [] if store.is_remote else list(_read_windows(store, archive))
    tail = store.read(file, archive.directory, pattern._size - archive.directory)
    # Find every CRC field of the directory; only these may differ from file to file.
    names = []
    struct_format = "<"
    position = stop = 0
    for _ in archive.records:
        n_name, n_extra, n_comment = CENTRAL.unpack_from(tail, position)[10:13]
        name_at = position + CENTRAL.size
        names.append(tail[name_at : name_at + n_name].decode().partition("/")[2])
        struct_format += f"{position + _CRC_AT - stop}sI"
        stop = position + _CRC_AT + 4
        position = name_at + n_name + n_extra + n_comment
    # The directory has other entries if another program added the zip's directories.
    if names != list(archive.records):
        return pattern
    # Cut the tail at the CRCs, by a struct that other files are unpacked with as well.
    pattern._cutter = struct.Struct(f"{struct_format}{len(tail) - stop}s")
    pattern._tail_at = archive.directory
    pattern.tail = pattern._cutter.unpack(tail)
    return pattern


def _read_windows(
    store: ReadStore, archive: Archive
) -> Iterator[tuple[int, int, list[tuple[int, bytes]]]]:
    """Read the local headers and the small records, in windows of at most 8 KiB.

    Yields:
        First byte, length in bytes, and [(byte in the window, expected bytes)].
    """
    # The small records have no tensors, so their data is compared, too.
    spans = []
    for (name, record), header in zip(archive.records.items(), archive.headers, strict=True):
        is_literal = name in ("byteorder", "version")
        spans.append((header, record.offset + (record.n_bytes if is_literal else 0)))
    spans.sort()
    # Group the spans by windows; None ends the last group.
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


def _compare_pickle(pattern: FilePattern, pickle: bytes) -> dict[str, int] | None:
    """Compare a pickle of equal length with the pattern's; add holes to the pattern as needed.

    Returns:
        The training arguments in the holes, with their values in the pickle; None if the pickles
        differ in anything else.
    """
    # Each round compares everything but the holes; a difference becomes a hole, or ends the
    # comparison.
    while True:
        start = 0
        differs_at = None
        for hole in [*pattern._holes, None]:
            # The opcode of a hole must be equal: it determines the width of the number.
            stop = len(pickle) if hole is None else hole.start + 1
            if pickle[start:stop] != pattern._pickle[start:stop]:
                differs_at = _find_difference(pickle, pattern._pickle, start, stop)
                break
            if hole is not None:
                start = hole.stop
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


def _find_difference(pickle: bytes, expected: bytes, start: int, stop: int) -> int:
    """Return the first byte in [start, stop) in which two pickles differ, by bisection.

    They must differ there.
    """
    while stop - start > 1:
        middle = (start + stop) // 2
        if pickle[start:middle] != expected[start:middle]:
            stop = middle
        else:
            start = middle
    return start


def _add_hole(pattern: FilePattern, position: int) -> bool:
    """Turn the integer at a byte of the pattern's pickle into a hole, if it is an argument.

    Returns:
        Whether a hole was added.
    """
    pickle = pattern._pickle
    if len(pattern._holes) >= _MAX_HOLES:
        return False
    # The integer that contains the byte begins with its opcode, which may not differ, at most four
    # bytes before. Other bytes may look like an opcode: only what is an argument's value is one.
    for start in range(position - 1, max(position - 5, -1), -1):
        stop = start + 1 + _WIDTHS.get(pickle[start], 0)
        if stop <= position:
            continue
        # It must be the value of a training argument that is not a hole yet.
        name = _find_argument(pickle, start, stop, file=pattern.file)
        if name is not None and all(hole.name != name for hole in pattern._holes):
            pattern._holes = sorted(
                [*pattern._holes, _Hole(start, stop, name)], key=lambda hole: hole.start
            )
            return True
    return False


def _find_argument(pickle: bytes, start: int, stop: int, *, file: str) -> str | None:
    """Return the name of the training argument whose value are bytes [start, stop) of a pickle.

    None if they are not the value of an argument, or the pickle uses them elsewhere too.
    """
    # Parse the pickle with a name in place of the number, and see where the name ends up. It is
    # random, so that nobody can have written it into the file.
    mark = Global(f"hole_{secrets.token_hex(16)}", "here")
    marked = pickle[:start] + f"c{mark.module}\n{mark.name}\n".encode() + pickle[stop:]
    try:
        # The mark is not a name in the file, so its use is not noted.
        with noting_uses(passes_on=False):
            root = load(marked, label=file, hooks=TensorHooks().hooks)
    except CheckpointingException:
        return None
    # The mark must be one argument, and occur nowhere else (the pickle may refer to it again).
    fields = attributes((as_mapping(root) or {}).get("args")) or {}
    names = [name for name, value in fields.items() if value == mark]
    n_marks = sum(type(node) is Global and node == mark for node in walk(root))
    return names[0] if len(names) == 1 and n_marks == 1 else None
