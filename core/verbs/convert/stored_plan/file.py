"""The proven plan as a file in the staging directory: written by the lead, read by all workers.

::

    ckpt plan 1
    ["model.w", …]      a line for each tensor: source and target positions of its fragments; JSON
    …
    columns             little-endian integers: offset of each line, file, offset and size of each
                        target array, owner of each tensor
    {"columns": …}      the trailer, JSON: source files with their stamps, target files, shared
                        tensors
    8 bytes             offset of the trailer

A worker reads the columns, and of the lines only those of its own tensors. It derives the work of
each again, as ``core.engine.plan.plan`` does, so the proof holds for it as well. The file contains
integers, names and the values of encodings (``core.verbs.convert.stored_plan.codec``), and nothing
that could be executed. The journal's identity is the hash of everything but the division.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array as columns
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, TargetFragment, TargetTensor, Tensor
from core.engine.plan.items import ITEM_BYTES, Portion
from core.engine.plan.match import Match, is_all, match
from core.engine.plan.plan import Plan
from core.engine.plan.positions import Places
from core.errors import CorruptError
from core.files.store import ReadStore, translate_os_errors
from core.values import dataclass
from core.verbs.convert.stored_plan.codec import Decoder, Encoder, refuse_class
from core.verbs.convert.stored_plan.division import Division, KeyWork

MAGIC = b"ckpt plan 1\n"
_FOOTER_BYTES = 8
_MAX_UNIT_BYTES = 32 << 20
"""Tensors with larger units are not shared, or several workers would decode the same unit."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A written plan without its division.

    Args:
        identity: hash of everything that determines which bytes are written where.
        works: the work of each tensor, for the division.
        write_bytes: bytes to write for each tensor.
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
    """Hash everything that determines which bytes a plan writes where, as hexadecimal SHA-256."""
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
            the modification times, of those with tensors and of all that were opened to build the
            plan.
        file: the file to write; None to compute the hash only.
        options: everything else that determines which bytes are written.
        item_bytes: as for ``core.engine.copy.options.CopyOptions``.

    Raises:
        UnsupportedError: several workers cannot share the plan
            (``core.verbs.convert.stored_plan.codec``).
    """
    sink = _HashedSink(file)
    sink.write(MAGIC)
    # A plan that is only hashed need not be decodable.
    unknown = repr if file is None else refuse_class
    encoder = Encoder(unknown)
    plain_lines = _PlainLines(plan, encoder)

    # Write a line for each tensor.
    lines = columns("q")
    write_bytes = columns("q")
    works: list[KeyWork] = []
    target_files: list[tuple[int, ...]] = []
    for key in iter(plan.keys()):
        lines.append(sink.n_bytes)
        line, work, n_written, files = _encode_line(plan, key, encoder, plain_lines)
        sink.write(line)
        works.append(work)
        write_bytes.append(n_written)
        target_files.append(files)
    lines.append(sink.n_bytes)

    # List the source's files: those with arrays by number, then all others that were opened.
    opened = encoder.encoding_files | set(getattr(source_store, "opened", ()))
    without_arrays = opened - encoder.files.keys()
    stamp_of = getattr(source_store, "stamp", lambda name: [source_store.size(name)])
    stamps = [[name, list(stamp_of(name))] for name in (*encoder.files, *sorted(without_arrays))]

    # Write the columns. The hash covers the trailer as it is before the division.
    sink.hash.update(_encode([options, item_bytes]).encode())
    trailer: dict[str, object] = {
        "buffer_bytes": plan.buffer_bytes,
        "cache_bytes": plan.cache_bytes,
        "compares": plan.compares,
        "files": stamps,
        "paths": [[image.path, image.size] for image in plan.images],
    }
    image, offset, n_bytes = plan.places.as_columns()
    parts = {"image": image, "offset": offset, "n_bytes": n_bytes, "lines": lines}
    trailer["columns"] = {name: _write_column(sink, part) for name, part in parts.items()}
    sink.hash.update(_encode(trailer).encode())
    return WrittenPlan(sink.hash.hexdigest(), works, write_bytes, target_files, trailer)


def finish_plan(file: IO[bytes], written: WrittenPlan, division: Division) -> None:
    """Write the division and the trailer, which end the file.

    Args:
        file: the file as ``write_plan`` left it.
        written: the result of ``write_plan``.
        division: the division of the tensors over workers.
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
    file.write(_encode(trailer).encode() + end.to_bytes(_FOOTER_BYTES, "little"))


_Line = tuple[bytes, KeyWork, int, tuple[int, ...]]
"""The line of a tensor, its work for the division, bytes to write, numbers of the files."""


def _encode_line(plan: Plan, key: str, encoder: Encoder, plain_lines: _PlainLines) -> _Line:
    """Encode a tensor as a line, and determine the facts about it that the division needs.

    Args:
        plan: the proven plan.
        key: the tensor.
        encoder: encodes the fragments.
        plain_lines: encodes tensors that are one array on both sides.
    """
    source, target = plan.source.tensor(key), plan.target.tensor(key)
    sources, targets = plan.source.fragments(key), plan.target.fragments(key)
    if len(sources) == len(targets) == 1:
        plain_line = plain_lines.line(key, source, target, sources[0], targets[0])
        if plain_line is not None:
            return plain_line

    # Name the target's arrays by their numbers in the columns.
    numbered: list[TargetFragment] = []
    files = set()
    images, _, _ = plan.places.as_columns()
    for fragment in targets:
        array = fragment.array
        if array is not None:
            number = plan.places.number_of(array.name)
            assert number is not None, "a plan places every array of the target"
            files.add(images[number])
            array = PlannedArray(str(number), array.dtype, array.shape)
        numbered.append(Fragment(fragment.box, array, fragment.at))
    row = (
        key,
        (source.dtype, source.shape, source.flexible),
        (target.dtype, target.shape, target.flexible),
        encoder.fragments(key, source, sources),
        encoder.fragments(key, target, numbered),
        plan.is_share,
    )
    n_written = sum(fragment.box.n_elements for fragment in targets) * itemsize(target.dtype)
    work = _measure_work(source, target, sources, n_written, compares=plan.compares)
    return _encode(row).encode() + b"\n", work, n_written, tuple(files)


def _measure_work(
    source: Tensor,
    target: TargetTensor,
    fragments: Sequence[Fragment],
    n_written: int,
    *,
    compares: bool,
) -> KeyWork:
    """Estimate the work of a tensor, for the division.

    Args:
        source, target: the tensor on both sides.
        fragments: the tensor's fragments in the source.
        n_written: bytes to write.
        compares: several copies of a box are compared.
    """
    n_copies: dict[Box, int] = {}
    dtype = source.dtype
    unit_bytes = 0
    for fragment in fragments:
        array = fragment.array
        if array is not None:
            dtype = array.dtype
            n_copies[fragment.box] = n_copies.get(fragment.box, 0) + 1
            if array.extent.encoding is not None:
                unit_bytes = max(unit_bytes, min(array.extent.encoding.unit_bytes, array.n_bytes))
    # Each box is read once for the copy; a comparison reads it and all its copies again.
    n_elements = sum(
        box.n_elements * (1 + n if compares and n > 1 else 1) for box, n in n_copies.items()
    )
    return KeyWork(
        n_elements * itemsize(dtype) + n_written,
        is_made=dtype != target.dtype or unit_bytes > 0,
        is_cuttable=unit_bytes <= _MAX_UNIT_BYTES,
    )


class _PlainLines:
    """Fast encoder for tensors that are one array on both sides, as most of a large model's are.

    Only names and addresses differ between tensors of one shape and dtype, so the rest of the line
    is encoded once for each kind. The text equals that of ``_encode_line``.
    """

    def __init__(self, plan: Plan, encoder: Encoder) -> None:
        self._places = plan.places
        self._images = plan.places.as_columns()[0]
        self._files = encoder.files
        self._end = f"],[],[0]],{_encode(plan.is_share)}]\n"
        self._texts_of_kind: dict[object, tuple[str, str, str, KeyWork, int, tuple[int, ...]]] = {}

    def line(
        self,
        key: str,
        source: Tensor,
        target: TargetTensor,
        fragment: Fragment,
        target_fragment: TargetFragment,
    ) -> _Line | None:
        """Encode a tensor that is one plain array on both sides; None for any other."""
        array, planned = fragment.array, target_fragment.array
        if array is None or planned is None:
            return None
        if not (is_all(fragment, array, source) and is_all(target_fragment, planned, target)):
            return None
        extent, number = array.extent, self._places.number_of(planned.name)
        details = (extent.encoding, extent.strides, extent.item, extent.part_of)
        if number is None or any(detail is not None for detail in details):
            return None

        # Look up the texts that all tensors of this kind have in common.
        image = self._images[number]
        sides = [(side.dtype, side.shape, side.flexible) for side in (source, target)]
        kind = (*sides, array.dtype, array.coords, planned.dtype, image)
        texts = self._texts_of_kind.get(kind)
        if texts is None:
            texts = _encode_kind(source, target, array, planned.dtype, image)
            self._texts_of_kind[kind] = texts
        sides_text, source_text, target_text, work, n_written, files = texts

        # Insert names and addresses; a name that equals the tensor's key is written as 0.
        name = "0" if array.name == key else _encode(array.name)
        target_name = "0" if str(number) == key else f'"{number}"'
        file = self._files.setdefault(extent.file, len(self._files))
        more = "" if extent.crc is None else f",null,null,-1,{extent.crc},null,null"
        line = (
            f"[{_encode(key)},{sides_text},"
            f"[[[{name},{source_text},{file},{extent.offset}{more}]],[],[0]],"
            f"[[[{target_name},{target_text}]{self._end}"
        )
        return line.encode(), work, n_written, files


def _encode_kind(
    source: Tensor, target: TargetTensor, array: StoredArray, target_dtype: str, image: int
) -> tuple[str, str, str, KeyWork, int, tuple[int, ...]]:
    """Encode what all plain lines of one kind have in common.

    Returns:
        The texts of both sides, of the source array and of the target array; the work, the bytes
        to write, and the numbers of the files.
    """
    sides = [(side.dtype, side.shape, side.flexible) for side in (source, target)]
    source_row = (0 if array.dtype == source.dtype else array.dtype, 0, array.coords)
    target_row = (0 if target_dtype == target.dtype else target_dtype, 0, ())
    sides_text, source_text, target_text = (
        _encode(part)[1:-1] for part in (sides, source_row, target_row)
    )
    work = KeyWork(array.n_bytes + target.n_bytes, is_made=array.dtype != target.dtype)
    return sides_text, source_text, target_text, work, target.n_bytes, (image,)


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
    """Compute the SHA-256 of a file, in hexadecimal.

    Raises:
        MissingShardError: the file does not exist.
        StorageError: the file cannot be read.
    """
    with translate_os_errors(str(path), doing="read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StoredPlan:
    """An open plan file; a context manager.

    Args:
        path: path of the file.
        digest: SHA-256 that the file must have.
        rank: the worker whose share to read.
        threads: number of copying threads.

    Raises (on entering):
        CorruptError: the file has another hash, or is not a plan.
        MissingShardError: the file does not exist.
        StorageError: the file cannot be read.
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
                digest = file_digest(self.path)
                if digest != self._digest:
                    raise CorruptError(
                        f"the plan's SHA-256 is {digest}, but the lead worker wrote {self._digest}",
                        file=str(self.path),
                        hint="make sure that all hosts see the same file system, and that only one "
                        "run at a time writes to the destination",
                    )
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

    def _load(self) -> None:
        """Read the trailer and the columns, and find this worker's tensors."""
        # The last bytes of the file are the offset of the trailer.
        size = os.fstat(self._fd).st_size
        begin = int.from_bytes(self._read(size - _FOOTER_BYTES, _FOOTER_BYTES), "little")
        trailer = json.loads(self._read(begin, size - _FOOTER_BYTES - begin))
        addresses = trailer["columns"]
        self.buffer_bytes: int = trailer["buffer_bytes"]
        self.cache_bytes: int = trailer["cache_bytes"]
        self.stamps: dict[str, tuple[int, ...]] = {
            name: tuple(stamp) for name, stamp in trailer["files"]
        }
        self._compares: bool = trailer["compares"]
        self._decoder = Decoder(list(self.stamps))
        self._lines = self._column(addresses["lines"])
        self._sizes = self._column(addresses["sizes"])
        paths = [path for path, _ in trailer["paths"]]
        positions = (self._column(addresses[name]) for name in ("image", "offset", "n_bytes"))
        self.places = Places.of_columns(paths, *positions)

        # Collect this worker's tensors: those it owns, and its parts of those that several share.
        owners = self._column(addresses["owners"])
        parts_of: dict[int, list[tuple[int, int | None]]] = {
            n: [(0, None)] for n in range(len(owners)) if owners[n] == self._rank
        }
        self.write_bytes = sum(self._sizes[n] for n in parts_of)
        for number, parts in trailer["shared"]:
            shares = [(start, stop, n) for worker, start, stop, n in parts if worker == self._rank]
            if shares:
                parts_of[number] = [(start, stop) for start, stop, _ in shares]
                # Only the progress display needs it: the tensor's bytes, in proportion to the work.
                total = max(1, sum(part[3] for part in parts))
                self.write_bytes += self._sizes[number] * sum(n for *_, n in shares) // total
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
        """Numbers of the tensors that this worker copies, completely or in part."""
        return frozenset(self._parts_of)

    def portions(self) -> Iterator[Portion]:
        """Yield this worker's share (``core.engine.copy.run.Work``)."""
        for number, parts in self._parts_of.items():
            work = None
            for start, stop in parts:
                work = work or self._match(number)
                yield Portion(number, work, start, stop)

    def _match(self, number: int) -> Match:
        begin, end = self._lines[number], self._lines[number + 1]
        key, *sides, sources, targets, is_share = json.loads(self._read(begin, end - begin))
        (dtype, shape, flexible), (target_dtype, target_shape, target_flexible) = sides
        source = Tensor(dtype, tuple(shape), flexible=flexible)
        target: TargetTensor = Tensor(target_dtype, tuple(target_shape), flexible=target_flexible)
        source_fragments = self._decoder.fragments(key, source, sources)
        # Prove the work again.
        work = match(
            key,
            replace(source, tiling=lambda: source_fragments),
            target,
            fragments=self._decoder.targets(key, target, targets),
            covers=not is_share,
        )
        return work if self._compares else replace(work, copies=())
