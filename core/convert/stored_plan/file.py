"""Store the proven plan as a file in the stage, which the lead writes and every worker reads.

::

    ckpt plan 1
    ["model.w", …]          a line for each tensor: where its pieces lie, and where they go; JSON
    …
    columns                 little-endian integers: where the lines begin, where arrays lie, the
    owner of each tensor
    {"columns": …}          the trailer, JSON: the source's files with their stamps, the target's
    paths, shared tensors
    8 bytes                 where the trailer begins

A worker reads the columns, and of the lines only those of its own tensors. It derives the work of
each again, as ``core.plan.plan`` does, so the proof holds for it as well. The file holds integers,
names and the values of encodings (``core.convert.stored_plan.codec``), and nothing that could be
executed. The journal's identity is the hash of everything but the division.
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
"""Tensors with larger units are not shared, or several workers would decode the same unit."""
_encoded = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan that has been written, all but its division.

    Args:
        identity: hash of everything that decides which bytes are written where.
        works: the work of each tensor, for the division.
        write_bytes: bytes to write of each tensor.
        target_files: numbers of the files that each tensor is written to.
        trailer: the file's trailer so far.
    """

    identity: str
    works: list[KeyWork]
    write_bytes: columns[int]
    target_files: list[tuple[int, ...]]
    trailer: dict[str, object]


class _HashedSink:
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


def identity_of(
    plan: Plan, source_store: ReadStore, *, options: str = "", item_bytes: int = ITEM_BYTES
) -> str:
    """Return a hash of everything that decides which bytes a plan writes where."""
    return write_plan(plan, source_store, None, options=options, item_bytes=item_bytes).identity


def write_plan(
    plan: Plan,
    source_store: ReadStore,
    file: IO[bytes] | None,
    *,
    options: str = "",
    item_bytes: int = ITEM_BYTES,
) -> WrittenPlan:
    """Write the lines and columns of a plan.

    Args:
        plan: the proven plan.
        source_store: the source's files. The hash covers the sizes, and where the store knows them
        the modification times, of those with tensors and of all that were opened to make the plan.
        file: the file to write; None if only the hash is wanted.
        options: whatever else decides which bytes are written.
        item_bytes: as for ``core.copy.options.CopyOptions``.

    Raises:
        UnsupportedError: several workers cannot share the plan
        (``core.convert.stored_plan.codec``).
    """
    sink = _HashedSink(file)
    sink.write(MAGIC)
    unknown = repr if file is None else refused
    encoder = Encoder(unknown)
    plain_lines = _PlainLines(plan, encoder)

    # Write a line for each tensor.
    lines = columns("q")
    write_bytes = columns("q")
    works: list[KeyWork] = []
    target_files: list[tuple[int, ...]] = []
    encoding_files: set[str] = set()
    for key in iter(plan.keys()):
        lines.append(sink.n_bytes)
        line, work, n_written, files = _line(plan, key, encoder, encoding_files, plain_lines)
        sink.write(line)
        works.append(work)
        write_bytes.append(n_written)
        target_files.append(files)
    lines.append(sink.n_bytes)

    # Write the columns. The hash covers the trailer as it is before the division.
    sink.hash.update(_encoded([options, item_bytes]).encode())
    trailer: dict[str, object] = {
        "buffer_bytes": plan.buffer_bytes,
        "cache_bytes": plan.cache_bytes,
        "compares": plan.compares,
        "bind": binder_name(plan.source.bind, unknown),
        "files": [
            [name, _stamp(source_store, name)]
            for name in _files(encoder, encoding_files, source_store)
        ],
        "paths": [[image.path, image.size] for image in plan.images],
    }
    columns_of_places = plan.places.as_columns()
    parts = {
        "image": columns_of_places[0],
        "offset": columns_of_places[1],
        "n_bytes": columns_of_places[2],
        "lines": lines,
    }
    trailer["columns"] = {name: _write_column(sink, part) for name, part in parts.items()}
    sink.hash.update(_encoded(trailer).encode())
    return WrittenPlan(sink.hash.hexdigest(), works, write_bytes, target_files, trailer)


def finish_plan(file: IO[bytes], written: WrittenPlan, division: Division) -> None:
    """Write the division and the trailer, which end the file.

    Args:
        file: the file as ``write_plan`` left it.
        written: the result of ``write_plan``.
        division: which worker does what.
    """
    sink = _HashedSink(file)
    begin = file.tell()
    owners = _write_column(sink, division.owners, begin)
    sizes = _write_column(sink, written.write_bytes, begin)
    shares = [
        [number, [[worker, part.start, part.stop, part.n_bytes] for worker, part in parts]]
        for number, parts in division.shared.items()
    ]
    column_places = written.trailer["columns"]
    assert isinstance(column_places, dict)
    trailer = {
        **written.trailer,
        "columns": {**column_places, "owners": owners, "sizes": sizes},
        "shared": shares,
    }
    end = begin + sink.n_bytes
    file.write(_encoded(trailer).encode() + end.to_bytes(_FOOTER_BYTES, "little"))


_Line = tuple[bytes, KeyWork, int, tuple[int, ...]]
"""The line of a tensor, its work for the division, bytes to write, numbers of the files."""


def _line(
    plan: Plan, key: str, encoder: Encoder, encoding_files: set[str], plain_lines: _PlainLines
) -> _Line:
    """Return the line of a tensor, and the facts about it that the division needs.

    Args:
        encoding_files: names of files that encodings read; those of this tensor are added.
        plain_lines: writes the lines of tensors that are one array on both sides.
    """
    have, want = plan.source.meta(key), plan.target.meta(key)
    sources, targets = plan.source.fragments(key), plan.target.fragments(key)
    zeros = plan.zeros.get(key, ())
    if len(sources) == len(targets) == 1 and not zeros:
        plain_line = plain_lines.line(have, want, sources[0], targets[0])
        if plain_line is not None:
            return plain_line
    numbered = [
        piece if piece.array is None else _numbered(piece, piece.array, plan.places)
        for piece in targets
    ]
    row = (
        key,
        (have.dtype, have.shape, have.flexible),
        (want.dtype, want.shape, want.flexible),
        encoder.fragments(have, sources),
        encoder.fragments(want, numbered),
        [(box.offset, box.shape) for box in zeros],
        plan.is_share,
    )

    # Count what is read: each box once, and its copies again where they are compared.
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
            encoding_files.update(files_read(encoding))
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
    """Writes the lines of tensors that are one array on both sides, as most of a large model's are.

    Only names and addresses differ between tensors of one shape and dtype. The text equals the
    encoder's.
    """

    def __init__(self, plan: Plan, encoder: Encoder) -> None:
        self._places = plan.places
        self._images = plan.places.as_columns()[0]
        self._files = encoder.files
        self._end = f"],[],[0]],[],{_encoded(plan.is_share)}]\n"
        self._texts_of_kind: dict[object, tuple[str, str, str, KeyWork, int, tuple[int, ...]]] = {}

    def line(
        self, have: TensorMeta, want: TensorMeta, piece: Fragment, target_piece: TargetFragment
    ) -> _Line | None:
        """Return the line of a tensor that is one array on both sides, or None."""
        array, planned = piece.array, target_piece.array
        if array is None or planned is None:
            return None
        if not (is_all(piece, array, have) and is_all(target_piece, planned, want)):
            return None
        extent, number = array.extent, self._places.number_of(planned.name)
        if number is None:
            return None
        if any(
            part is not None
            for part in (extent.encoding, extent.strides, extent.item_bytes, extent.part_of)
        ):
            return None
        image = self._images[number]
        sides = (have.dtype, have.shape, have.flexible, want.dtype, want.shape, want.flexible)
        kind = (sides, array.dtype, array.coords, planned.dtype, image)
        texts = self._texts_of_kind.get(kind)
        if texts is None:
            texts = self._texts_of_kind[kind] = _plain_kind(have, want, array, planned, image)
        between, source, target, work, n_written, files = texts
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
    """Return the texts, work, bytes to write and file numbers of all lines of one kind."""
    sides = [(side.dtype, side.shape, side.flexible) for side in (have, want)]
    source = (0 if array.dtype == have.dtype else array.dtype, 0, array.coords)
    target = (0 if place.dtype == want.dtype else place.dtype, 0, ())
    n_written = want.n_bytes
    work = KeyWork(array.n_bytes + n_written, is_made=array.dtype != want.dtype)
    texts = [_encoded(part)[1:-1] for part in (sides, source, target)]
    return texts[0], f",{texts[1]}", f",{texts[2]}", work, n_written, (image,)


def _numbered(piece: TargetFragment, array: PlannedArray, places: Places) -> TargetFragment:
    """Return a fragment of the target whose array is named by its number in the columns."""
    name = str(places.number_of(array.name))
    return Fragment(piece.key, piece.box, PlannedArray(name, array.dtype, array.shape), piece.at)


def _files(encoder: Encoder, encoding_files: set[str], store: ReadStore) -> list[str]:
    """Return the source's files: those with arrays by number, then all others that were opened."""
    rest = (encoding_files | set(getattr(store, "opened", ()))) - encoder.files.keys()
    return [*encoder.files, *sorted(rest)]


def _stamp(store: ReadStore, name: str) -> list[int]:
    stamp = getattr(store, "stamp", None)
    return [store.size(name)] if stamp is None else list(stamp(name))


def _write_column(sink: _HashedSink, column: columns[int], begin: int = 0) -> list[object]:
    """Write a column, and return its (type code, address, bytes)."""
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
    """Return the SHA-256 of a file in hexadecimal.

    Raises:
        StorageError, MissingShardError: the file cannot be read.
    """
    with translate_os_errors(str(path), doing="read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StoredPlan:
    """An open plan file; a context manager.

    Args:
        path: path of the file.
        digest: SHA-256 that the file must have.
        rank: the worker whose share is wanted.
        threads: number of copying threads.

    Raises (on entering):
        CorruptError: the file has another hash, or is not a plan.
        StorageError, MissingShardError: the file cannot be read.
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
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        digest = file_digest(self.path)
        if digest != self._digest:
            raise CorruptError(
                f"the plan has SHA-256 {digest}, but the lead's plan has {self._digest}",
                file=str(self.path),
                hint="all hosts must see the same file system, and only one run at a time may write a destination",
            )

    def _load(self) -> None:
        """Read the trailer and the columns, and find this worker's tensors."""
        size = os.fstat(self._fd).st_size
        begin = int.from_bytes(self._read(size - _FOOTER_BYTES, _FOOTER_BYTES), "little")
        trailer = json.loads(self._read(begin, size - _FOOTER_BYTES - begin))
        places = trailer["columns"]
        self.buffer_bytes: int = trailer["buffer_bytes"]
        self.cache_bytes: int = trailer["cache_bytes"]
        self.stamps: dict[str, tuple[int, ...]] = {
            name: tuple(stamp) for name, stamp in trailer["files"]
        }
        self._compares: bool = trailer["compares"]
        self._bind: Callable[[ReadStore, StoredArray], StoredArray] = BINDERS[trailer["bind"]]
        self._decoder = Decoder(list(self.stamps))
        self._lines = self._column(places["lines"])
        self._sizes = self._column(places["sizes"])
        paths = [path for path, _ in trailer["paths"]]
        position_columns = (self._column(places[name]) for name in ("image", "offset", "n_bytes"))
        self.places = Places.of_columns(paths, *position_columns)

        # Collect this worker's tensors: those it owns, and its parts of those that several share.
        owners = self._column(places["owners"])
        parts_of: dict[int, list[tuple[int, int | None]]] = {
            n: [(0, None)] for n in range(len(owners)) if owners[n] == self._rank
        }
        self.write_bytes = sum(self._sizes[n] for n in parts_of)
        for number, parts in trailer["shared"]:
            own = [(start, stop, n) for worker, start, stop, n in parts if worker == self._rank]
            if own:
                parts_of[number] = [(start, stop) for start, stop, _ in own]
                total = sum(part[3] for part in parts)
                self.write_bytes += self._sizes[number] * sum(n for *_, n in own) // max(1, total)
        self._parts_of = dict(sorted(parts_of.items()))

    def _read(self, offset: int, n_bytes: int) -> bytes:
        data = os.pread(self._fd, n_bytes, offset)
        while len(data) < n_bytes:
            more = os.pread(self._fd, n_bytes - len(data), offset + len(data))
            if not more:
                raise CorruptError("the plan is truncated", file=str(self.path))
            data += more
        return data

    def _column(self, place: Sequence[Any]) -> columns[int]:
        kind, offset, n_bytes = place
        column: columns[int] = columns(kind)
        column.frombytes(self._read(offset, n_bytes))
        return _little(column)

    @property
    def numbers(self) -> frozenset[int]:
        """Return the numbers of the tensors that this worker copies, wholly or in part."""
        return frozenset(self._parts_of)

    def portions(self) -> Iterator[Portion]:
        """Yield this worker's share, as ``core.copy.run.Work`` defines."""
        for number, parts in self._parts_of.items():
            work = None
            for start, stop in parts:
                work = work or self._match(number)
                yield Portion(number, work, start, stop)

    def bind(self, store: ReadStore, array: StoredArray) -> StoredArray:
        """Return an array with its position in a file, as ``Catalog.bind`` does."""
        return self._bind(store, array)

    def _match(self, number: int) -> Match:
        begin, end = self._lines[number], self._lines[number + 1]
        key, have, want, sources, targets, zeros, is_share = json.loads(
            self._read(begin, end - begin)
        )
        source, target = (
            TensorMeta(key, dtype, tuple(shape), flexible)
            for dtype, shape, flexible in (have, want)
        )
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
