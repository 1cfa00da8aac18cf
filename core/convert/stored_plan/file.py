"""The proven plan as a file in the stage, which the lead writes and every worker reads.

::

    ckpt plan 1
    ["model.w", …]          a line for each tensor: where its pieces lie, and where they go; JSON
    …
    columns                 little-endian integers: where the lines begin, where arrays lie, whose a tensor is
    {"columns": …}          the trailer, JSON: the source's files with their stamps, the target's paths, who shares what
    8 bytes                 where the trailer begins

A worker reads the columns, and of the lines only those of its own tensors. It derives the work of each again, as
``core.plan.plan`` does, so the proof holds for it as well. The file holds integers, names and the values of encodings
(``core.convert.stored_plan.codec``), nothing that could be run. The journal's identity is the hash of everything but
the division.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array as columns
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.catalog.catalog import Catalog, Fragment, TargetFragment, TensorMeta
from core.catalog.file_image import FileImage
from core.catalog.stored import PlannedArray, StoredArray, files_read
from core.convert.stored_plan.codec import BINDERS, Decoder, Encoder, binder_name, refused
from core.convert.stored_plan.division import Division, KeyWork
from core.errors import CorruptError
from core.files.store import ReadStore, translate_os_errors
from core.plan.items import ITEM_BYTES, Portion
from core.plan.match import Match, is_all, match
from core.plan.plan import Plan
from core.plan.positions import Places

MAGIC = b"ckpt plan 1\n"
_FOOTER_BYTES = 8
_MAX_UNIT_BYTES = 32 << 20
"""Tensors with larger decoded units are not shared, or every sharer would decode the same."""
_encoded = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Written:
    """A plan that has been written, all but its division.

    Args:
        identity: hash of all that decides which bytes are written where.
        works: what dividing needs to know of each tensor.
        write_bytes: of each tensor.
        target_files: numbers of the files that each tensor is written to.
        trailer: the file's, so far.
    """

    identity: str
    works: list[KeyWork]
    write_bytes: columns[int]
    target_files: list[tuple[int, ...]]
    trailer: dict[str, object]


class _Sink:
    """A file that is written and hashed, or only hashed."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        self.hash.update(data)
        self.n_bytes += len(data)
        if self._file is not None:
            self._file.write(data)


def identity_of(plan: Plan, source_store: ReadStore, *, options: str = "", item_bytes: int = ITEM_BYTES) -> str:
    """A hash of everything that decides which bytes a plan writes where; see ``write_plan``."""
    return write_plan(plan, source_store, None, options=options, item_bytes=item_bytes).identity


def write_plan(
    plan: Plan, source_store: ReadStore, file: IO[bytes] | None, *, options: str = "", item_bytes: int = ITEM_BYTES
) -> Written:
    """Writes the lines and columns of a plan.

    Args:
        plan: the plan.
        source_store: the sizes of its files, and where the store knows them their modification times, are part of the
            hash: of those with tensors, and of all that were opened to make the plan.
        file: gets it; None if only the hash is wanted.
        options: whatever else decides which bytes are written.
        item_bytes: as for ``core.copy.options.CopyOptions``.

    Raises:
        UnsupportedError: several workers cannot share it, see ``core.convert.stored_plan.codec``.
    """
    sink = _Sink(file)
    sink.write(MAGIC)
    unknown = repr if file is None else refused
    encoder = Encoder(unknown)
    plain_lines = _PlainLines(plan, encoder)
    lines = columns("q")
    write_bytes = columns("q")
    works: list[KeyWork] = []
    target_files: list[tuple[int, ...]] = []
    others: set[str] = set()
    for key in iter(plan.keys()):
        lines.append(sink.n_bytes)
        line, work, n_written, files = _line(plan, key, encoder, others, plain_lines)
        sink.write(line)
        works.append(work)
        write_bytes.append(n_written)
        target_files.append(files)
    lines.append(sink.n_bytes)
    sink.hash.update(_encoded([options, item_bytes]).encode())
    trailer: dict[str, object] = {
        "buffer_bytes": plan.buffer_bytes,
        "cache_bytes": plan.cache_bytes,
        "compares": plan.compares,
        "bind": binder_name(plan.source.bind, unknown),
        "files": [[name, _stamp(source_store, name)] for name in _files(encoder, others, source_store)],
        "paths": [[image.path, image.size] for image in plan.images],
    }
    place = plan.places.as_columns()
    parts = {"image": place[0], "offset": place[1], "n_bytes": place[2], "lines": lines}
    trailer["columns"] = {name: _write_column(sink, part) for name, part in parts.items()}
    sink.hash.update(_encoded(trailer).encode())
    return Written(sink.hash.hexdigest(), works, write_bytes, target_files, trailer)


def finish_plan(file: IO[bytes], written: Written, division: Division) -> None:
    """Writes who does what, and the end of the file.

    Args:
        file: as ``write_plan`` left it.
    """
    sink = _Sink(file)
    begin = file.tell()
    owners = _write_column(sink, division.owners, begin)
    sizes = _write_column(sink, written.write_bytes, begin)
    shares = [
        [number, [[worker, part.start, part.stop, part.n_bytes] for worker, part in parts]]
        for number, parts in division.shared.items()
    ]
    found = written.trailer["columns"]
    assert isinstance(found, dict)
    trailer = {**written.trailer, "columns": {**found, "owners": owners, "sizes": sizes}, "shared": shares}
    end = begin + sink.n_bytes
    file.write(_encoded(trailer).encode() + end.to_bytes(_FOOTER_BYTES, "little"))


_Line = tuple[bytes, KeyWork, int, tuple[int, ...]]
"""The line of a tensor, what dividing needs to know of it, bytes to write, numbers of the files."""


def _line(plan: Plan, key: str, encoder: Encoder, others: set[str], plain_lines: _PlainLines) -> _Line:
    have, want = plan.source.meta(key), plan.target.meta(key)
    sources, targets = plan.source.fragments(key), plan.target.fragments(key)
    zeros = plan.zeros.get(key, ())
    if len(sources) == len(targets) == 1 and not zeros:
        found = plain_lines.line(have, want, sources[0], targets[0])
        if found is not None:
            return found
    numbered = [piece if piece.array is None else _numbered(piece, piece.array, plan.places) for piece in targets]
    row = (
        key,
        (have.dtype, have.shape, have.flexible),
        (want.dtype, want.shape, want.flexible),
        encoder.fragments(have, sources),
        encoder.fragments(want, numbered),
        [(box.offset, box.shape) for box in zeros],
        plan.is_share,
    )
    boxes: dict[Box, int] = {}
    dtype = have.dtype
    unit = 0
    for piece in sources:
        if piece.array is None:
            continue
        dtype = piece.array.dtype
        boxes[piece.box] = boxes.get(piece.box, 0) + 1
        encoding = piece.array.extent.encoding
        if encoding is not None:
            others.update(files_read(encoding))
            unit = max(unit, min(encoding.unit_bytes, piece.array.n_bytes))
    once = sum(box.n_elements for box in boxes)
    compared = sum(n * box.n_elements for box, n in boxes.items() if n > 1) if plan.compares else 0
    written = sum(piece.box.n_elements for piece in targets) * itemsize(want.dtype)
    work = KeyWork(
        (once + compared) * itemsize(dtype) + written,
        is_made=dtype != want.dtype or unit > 0,
        is_cuttable=unit <= _MAX_UNIT_BYTES,
    )
    images, _, _ = plan.places.as_columns()
    files = {images[int(piece.array.name)] for piece in numbered if piece.array is not None}
    return _encoded(row).encode() + b"\n", work, written, tuple(files)


class _PlainLines:
    """Lines of tensors that are one array on both sides, as most of a large model's are.

    Only names and addresses differ between those of one shape and dtype. The text is that of the encoder.
    """

    def __init__(self, plan: Plan, encoder: Encoder) -> None:
        self._places = plan.places
        self._images = plan.places.as_columns()[0]
        self._files = encoder.files
        self._end = f"],[],[0]],[],{_encoded(plan.is_share)}]\n"
        self._known: dict[object, tuple[str, str, str, KeyWork, int, tuple[int, ...]]] = {}

    def line(self, have: TensorMeta, want: TensorMeta, one: Fragment, wanted: TargetFragment) -> _Line | None:
        """What ``_line`` gives; None for a tensor of another kind."""
        array, place = one.array, wanted.array
        if array is None or place is None or not (is_all(one, array, have) and is_all(wanted, place, want)):
            return None
        extent, number = array.extent, self._places.number_of(place.name)
        if number is None:
            return None
        if any(part is not None for part in (extent.encoding, extent.strides, extent.item_bytes, extent.part_of)):
            return None
        image = self._images[number]
        sides = (have.dtype, have.shape, have.flexible, want.dtype, want.shape, want.flexible)
        kind = (sides, array.dtype, array.coords, place.dtype, image)
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = _plain_kind(have, want, array, place, image)
        between, source, target, work, n_written, files = known
        key = have.key
        name, number_name = "0" if array.name == key else _encoded(array.name), str(number)
        file = self._files.setdefault(extent.file, len(self._files))
        more = "" if extent.crc is None else f",null,null,-1,{extent.crc},null,false"
        number_name = "0" if number_name == key else f'"{number_name}"'
        line = (
            f"[{_encoded(key)},{between},[[[{name}{source},{file},{extent.offset}{more}]],[],[0]],"
            f"[[[{number_name}{target}]{self._end}"
        )
        return line.encode(), work, n_written, files


def _plain_kind(
    have: TensorMeta, want: TensorMeta, array: StoredArray, place: PlannedArray, image: int
) -> tuple[str, str, str, KeyWork, int, tuple[int, ...]]:
    """What lines of ``_PlainLines`` have in common: three texts, and what ``_line`` gives beside the line."""
    sides = [(side.dtype, side.shape, side.flexible) for side in (have, want)]
    source = (0 if array.dtype == have.dtype else array.dtype, 0, array.coords)
    target = (0 if place.dtype == want.dtype else place.dtype, 0, ())
    n_written = want.n_bytes
    work = KeyWork(array.n_bytes + n_written, is_made=array.dtype != want.dtype)
    texts = [_encoded(part)[1:-1] for part in (sides, source, target)]
    return texts[0], f",{texts[1]}", f",{texts[2]}", work, n_written, (image,)


def _numbered(piece: TargetFragment, array: PlannedArray, places: Places) -> TargetFragment:
    """A fragment of the target whose array has its number for a name; where it lies is told by the columns."""
    name = str(places.number_of(array.name))
    return Fragment(piece.key, piece.box, PlannedArray(name, array.dtype, array.shape), piece.at)


def _files(encoder: Encoder, others: set[str], store: ReadStore) -> list[str]:
    """The files of the source: those that hold arrays by their numbers, then those that were opened otherwise."""
    rest = (others | set(getattr(store, "opened", ()))) - encoder.files.keys()
    return [*encoder.files, *sorted(rest)]


def _stamp(store: ReadStore, name: str) -> list[int]:
    stamp = getattr(store, "stamp", None)
    return [store.size(name)] if stamp is None else list(stamp(name))


def _write_column(sink: _Sink, column: columns[int], begin: int = 0) -> list[object]:
    """Writes a column; (type, address, bytes)."""
    data = _little(column).tobytes()
    place: list[object] = [column.typecode, begin + sink.n_bytes, len(data)]
    sink.write(data)
    return place


def _little(column: columns[int]) -> columns[int]:
    if sys.byteorder == "big":
        column = columns(column.typecode, column)
        column.byteswap()
    return column


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        StorageError, MissingShardError: it cannot be read.
    """
    with translate_os_errors(str(path), doing="read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StoredPlan:
    """A plan file that is open; a context manager.

    Args:
        path: of the file.
        digest: SHA-256 that it must have.
        rank: the worker whose share it is opened for.
        threads: that copy.

    Raises (on entering):
        CorruptError: it has another hash, or is no plan.
        StorageError, MissingShardError: it cannot be read.
    """

    def __init__(self, path: Path, digest: str, *, rank: int, threads: int) -> None:
        self.path = path
        self.threads = threads
        self.images: Sequence[FileImage] = ()
        self._digest = digest
        self._rank = rank
        self._fd = -1

    def __enter__(self) -> StoredPlan:
        with translate_os_errors(str(self.path), doing="read"):
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._check()
                self._load()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        found = file_digest(self.path)
        if found != self._digest:
            raise CorruptError(
                f"the plan has SHA-256 {found}, the lead's has {self._digest}",
                file=str(self.path),
                hint="all hosts must see one file system, and one run at a time may write a destination",
            )

    def _load(self) -> None:
        size = os.fstat(self._fd).st_size
        begin = int.from_bytes(self._read(size - _FOOTER_BYTES, _FOOTER_BYTES), "little")
        trailer = json.loads(self._read(begin, size - _FOOTER_BYTES - begin))
        places = trailer["columns"]
        self.buffer_bytes: int = trailer["buffer_bytes"]
        self.cache_bytes: int = trailer["cache_bytes"]
        self.stamps: dict[str, tuple[int, ...]] = {name: tuple(stamp) for name, stamp in trailer["files"]}
        self._compares: bool = trailer["compares"]
        self._bind: Callable[[ReadStore, StoredArray], StoredArray] = BINDERS[trailer["bind"]]
        self._decoder = Decoder(list(self.stamps))
        self._lines = self._column(places["lines"])
        self._sizes = self._column(places["sizes"])
        paths = [path for path, _ in trailer["paths"]]
        kept = (self._column(places[name]) for name in ("image", "offset", "n_bytes"))
        self.places = Places.of_columns(paths, *kept)
        owners = self._column(places["owners"])
        mine: dict[int, list[tuple[int, int | None]]] = {
            n: [(0, None)] for n in range(len(owners)) if owners[n] == self._rank
        }
        self.write_bytes = sum(self._sizes[n] for n in mine)
        for number, parts in trailer["shared"]:
            found = [(start, stop, n) for worker, start, stop, n in parts if worker == self._rank]
            if found:
                mine[number] = [(start, stop) for start, stop, _ in found]
                total = sum(part[3] for part in parts)
                self.write_bytes += self._sizes[number] * sum(n for *_, n in found) // max(1, total)
        self._mine = dict(sorted(mine.items()))

    def _read(self, offset: int, n_bytes: int) -> bytes:
        data = os.pread(self._fd, n_bytes, offset)
        while len(data) < n_bytes:
            more = os.pread(self._fd, n_bytes - len(data), offset + len(data))
            if not more:
                raise CorruptError("the plan is too short", file=str(self.path))
            data += more
        return data

    def _column(self, place: Sequence[Any]) -> columns[int]:
        kind, offset, n_bytes = place
        column: columns[int] = columns(kind)
        column.frombytes(self._read(offset, n_bytes))
        return _little(column)

    @property
    def numbers(self) -> frozenset[int]:
        """The tensors of which this worker does something."""
        return frozenset(self._mine)

    def portions(self) -> Iterator[Portion]:
        """What this worker does; see ``core.copy.run.Work``."""
        for number, parts in self._mine.items():
            work = None
            for start, stop in parts:
                work = work or self._match(number)
                yield Portion(number, work, start, stop)

    def bind(self, store: ReadStore, array: StoredArray) -> StoredArray:
        """See ``Catalog.bind``."""
        return self._bind(store, array)

    def _match(self, number: int) -> Match:
        begin, end = self._lines[number], self._lines[number + 1]
        key, have, want, sources, targets, zeros, is_share = json.loads(self._read(begin, end - begin))
        source, target = (TensorMeta(key, dtype, tuple(shape), flexible) for dtype, shape, flexible in (have, want))
        pieces = self._decoder.fragments(source, sources)
        aims = self._decoder.targets(target, targets)
        work = match(
            Catalog("plan", None, {key: source}, lambda _: pieces),
            Catalog("plan", None, {key: target}, lambda _: aims),
            key,
            zeros=[Box(tuple(offset), tuple(shape)) for offset, shape in zeros],
            covers=not is_share,
        )
        return work if self._compares else replace(work, copies=())
