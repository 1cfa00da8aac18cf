"""flax's msgpack files: ``flax_model.msgpack``, and what ``flax.serialization.to_bytes`` returns.

On disk (a directory has one of the first two, or is given as the file itself)::

    flax_model.msgpack                       one file
    flax_model-00001-of-00002.msgpack …      pieces, whose trees are merged, with
    flax_model.msgpack.index.json            {"weight_map": {"model/embed/kernel": "flax_model-…"}}
    checkpoint_10                            flax.training.checkpoints, opened as a file

``core.formats.flax`` describes the content of a file. Lists, tuples and NamedTuples are
maps whose keys are ``"0"``, ``"1"`` … or the fields' names, so they come back as dicts. Arrays are
byte ranges of the file.

``Catalog.iteration`` is set from an integer called ``step``.

Versions: flax 0.12; earlier ones write the same files.

Not supported: writing; arrays of types that ``core.arrays.dtypes`` does not list (strings, objects,
``V2`` of very old files), which are refused by name.

Source: files written by flax 0.12.8 (``flax/serialization.py``); names of pieces as transformers 4
writes them.

Read a msgpack file of flax, without the data of its arrays.

::

    map         {"params": {"dense": {"kernel": ext 1, "bias": ext 1}}, "step": 7}
    ext 1, 3    msgpack of [shape, name of the dtype, bin]: array, scalar of numpy
    ext 2       msgpack of [real, imaginary]: complex number
    map         {"__msgpack_chunked_array__": true, "shape": {"0": rows, …},
                 "chunks": {"0": ext 1, …}}: an array of more than 1 GiB, flattened and cut

Lengths are checked against the file before anything is read or allocated; maps may be nested 100
levels deep.

Source: the msgpack specification; files written by flax 0.12.8 with msgpack 1.2.

Not supported: other extensions; a text or bytes of more than 16 MiB that is not an array.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import boxes_of_flat_range, full_box
from core.arrays.dtypes import DTYPES, dtype_of, itemsize
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.stored import Extent, StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import (
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.json_object import read_json_object
from core.files.store import check_name
from core.formats.format import Format, no_folders
from core.formats.huggingface.index import list_indexed
from core.formats.missing_entries import report_missing
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import Path, join_path, nest_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

SUFFIX = ".msgpack"
SINGLE = "flax_model.msgpack"
INDEX = "flax_model.msgpack.index.json"
_TRAINING_FILE = re.compile(r"(.*_)?checkpoint_\d+$")
_MAX_ITERATION = 1 << 48


def sniff(store: ReadStore) -> bool:
    """Return whether a file begins as a msgpack map and has flax's name, or a directory has one."""
    if store.entry is None:
        return store.exists(SINGLE) or store.exists(INDEX)
    name = store.entry.rpartition("/")[2]
    if not (name.endswith(SUFFIX) or _TRAINING_FILE.match(name)) or not store.exists(store.entry):
        return False
    head = store.read(store.entry, 0, 1) if store.size(store.entry) else b""
    return bool(head) and (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a file, or of the pieces of a directory.

    Raises:
        CorruptError, TruncatedError: the msgpack is malformed, or two pieces have the same entry.
        MissingShardError: a piece is missing.
        UnsafeError: maps are nested too deeply, or a name leads outside the directory.
        UnsupportedError: an array has a type that is not supported.
    """
    # The leaves of all files, by path.
    leaves: dict[Path, object] = {}
    files, listed = _files(store)
    for file in files:
        scanner = Scanner(store, file)
        tree = scanner.value(depth=0)
        if not isinstance(tree, dict):
            raise CorruptError("the msgpack data is not a map of entries", file=file)
        if scanner.at != store.size(file):
            raise CorruptError(
                f"{store.size(file) - scanner.at} extra bytes follow the end of the msgpack data",
                file=file,
            )
        for path, leaf in _leaves(tree, ()):
            if path in leaves:
                raise CorruptError(
                    "another file also contains this entry", file=file, key=join_path(path)
                )
            leaves[path] = leaf
    names = {"/".join(map(str, path)) for path in leaves} if listed else set()
    for name, file in listed.items():
        if name not in names:
            report_missing(
                MissingShardError(
                    f"{INDEX} lists the entry in this file, but it is missing there",
                    file=file,
                    key=name,
                    hint="files from two checkpoints may be mixed; copy one checkpoint into an "
                    "empty directory",
                )
            )

    # Arrays become tensors, everything else objects.
    arrays: dict[str, FlatPart | ChunkedArray] = {}
    objects: dict[str, StoredObject] = {}
    marked: dict[Path, object] = {}
    for path, leaf in leaves.items():
        key = join_path(path)
        if key in arrays or key in objects:
            raise CorruptError("two entries have this name", file=store.label, key=key)
        if isinstance(leaf, (FlatPart, ChunkedArray)):
            arrays[key], marked[path] = leaf, TensorLeaf(key)
        else:
            objects[key], marked[path] = StoredObject(key, value=leaf), ObjectLeaf(key)
    catalog: Catalog = Catalog(
        format="flax",
        version=None,
        tensors={
            key: Tensor(array.dtype, array.shape, partial(_fragments, key, array))
            for key, array in arrays.items()
        },
        objects=objects,
        skeleton=nest_leaves(marked) if marked else {},
    )
    return replace(catalog, iteration=_iteration(store, catalog))


def _files(store: ReadStore) -> tuple[list[str], dict[str, str]]:
    """Return the files of a checkpoint, and the entries in its index: path → file.

    Raises:
        CorruptError: the index is malformed.
        MissingShardError: a piece that the index lists is missing.
    """
    if store.entry is not None:
        return [store.entry], {}
    if store.exists(SINGLE):
        return [SINGLE], {}
    weight_map = read_json_object(store, INDEX, max_bytes=256 << 20).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError("weight_map is missing or empty", file=INDEX)
    files: dict[str, None] = {}
    for key, file in weight_map.items():
        if check_name(file, found_in=INDEX) not in files and not store.exists(file):
            raise MissingShardError(
                "the index lists this file, but it is missing",
                file=file,
                key=key,
                hint="copy the checkpoint again, with all its files",
            )
        files[file] = None
    return sorted(files), weight_map


def _leaves(node: Mapping[str, object], path: Path) -> list[tuple[Path, object]]:
    """Return the leaves below a map: arrays, values, and empty maps."""
    leaves: list[tuple[Path, object]] = []
    for name, item in node.items():
        if isinstance(item, dict) and item:
            leaves += _leaves(item, (*path, name))
        else:
            leaves.append(((*path, name), item))
    return leaves


def _fragments(key: str, array: FlatPart | ChunkedArray) -> Sequence[Fragment]:
    """Return the fragments of a tensor: one, or the boxes of every flattened chunk."""
    if isinstance(array, FlatPart):
        stored = StoredArray(key, array.dtype, array.shape, Extent(array.file, array.offset))
        return (Fragment(full_box(array.shape), stored, (0,) * len(array.shape)),)
    fragments = []
    start = 0
    for chunk in array.chunks:
        offset = chunk.offset
        for box in boxes_of_flat_range(array.shape, start, start + chunk.shape[0]):
            # The boxes of a flat range follow each other in C order, so each is a dense run.
            stored = StoredArray(
                array_name(key, box), array.dtype, box.shape, Extent(chunk.file, offset)
            )
            fragments.append(Fragment(box, stored, (0,) * box.rank))
            offset += stored.n_bytes
        start += chunk.shape[0]
    return fragments


def _iteration(store: ReadStore, catalog: Catalog) -> int | None:
    """Return the integer ``step``, a value or an array without axes; None without."""
    item = catalog.objects.get("step")
    number = None if item is None else item.value
    tensor = catalog.tensors.get("step")
    if tensor is not None and tensor.shape == () and dtype_of(tensor.dtype).kind in ("int", "uint"):
        array = catalog.fragments("step")[0].array
        assert array is not None
        data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
        number = int.from_bytes(data, "little", signed=dtype_of(tensor.dtype).kind == "int")
    return number if type(number) is int and 0 <= number < _MAX_ITERATION else None


_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
"""Codes of flax's extensions."""
_CHUNKED = "__msgpack_chunked_array__"
_MAX_DEPTH = 100
_MAX_TEXT_BYTES = 16 << 20
_MAX_RANK = 64
_WINDOW_BYTES = 64 << 10
_COPY_AGAIN = "copy the file again, or use an older one"
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
"""Type → format of ``struct``."""
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Type of a run of bytes → bytes of its length."""


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A run of elements in a file.

    Args:
        dtype, shape: canonical dtype, and shape in elements.
        file, offset: its first byte.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ChunkedArray:
    """An array that is stored as runs of its flattened elements."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[FlatPart, ...]


class Scanner:
    """A reader of one msgpack file that leaves the data of arrays unread.

    Args:
        store: the checkpoint.
        file: the file.
    """

    def __init__(self, store: ReadStore, file: str) -> None:
        self._store = store
        self._file = file
        self._size = store.size(file)
        self._window = b""
        self._window_at = 0
        self.at = 0

    def _error(self, message: str) -> CorruptError:
        return CorruptError(message, file=self._file, span=(self.at, self.at), hint=_COPY_AGAIN)

    def _skip(self, n_bytes: int) -> int:
        """Move past bytes, and return the offset of the first one.

        Raises:
            TruncatedError: the file ends before.
        """
        start = self.at
        if n_bytes > self._size - start:
            raise TruncatedError(
                f"{n_bytes:,} bytes should follow byte {start:,}, but the file is only "
                f"{self._size:,} bytes long",
                file=self._file,
                hint=_COPY_AGAIN,
            )
        self.at += n_bytes
        return start

    def _take(self, n_bytes: int) -> bytes:
        """Read bytes; small reads share one read of the store."""
        start = self._skip(n_bytes)
        inside = start - self._window_at
        if inside < 0 or inside + n_bytes > len(self._window):
            length = min(max(n_bytes, _WINDOW_BYTES), self._size - start)
            self._window, self._window_at = self._store.read(self._file, start, length), start
            inside = 0
        return self._window[inside : inside + n_bytes]

    def _number(self, n_bytes: int) -> int:
        """Read an unsigned big-endian integer."""
        return int.from_bytes(self._take(n_bytes), "big")

    def value(self, *, depth: int) -> object:
        """Read a value; arrays become their positions.

        Raises:
            CorruptError, TruncatedError: the msgpack is malformed.
            UnsafeError: maps are nested too deeply.
            UnsupportedError: an array has a type that is not supported.
        """
        if depth > _MAX_DEPTH:
            raise UnsafeError(
                f"maps are nested more than {_MAX_DEPTH} levels deep", file=self._file
            )
        mark = self._number(1)
        # Small integers, and the constants.
        if mark <= 0x7F:
            return mark
        if mark >= 0xE0:
            return mark - 0x100
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        # Numbers.
        if mark in _NUMBERS:
            code = _NUMBERS[mark]
            return struct.unpack(code, self._take(struct.calcsize(code)))[0]
        # Containers, strings and bytes: a length, in the mark or after it.
        if mark <= 0x8F:
            return self._map(mark & 0x0F, depth)
        if mark <= 0x9F:
            return self._list(mark & 0x0F, depth)
        if mark <= 0xBF:
            return self._text(mark & 0x1F)
        if mark in (0xDE, 0xDF):
            return self._map(self._number(2 if mark == 0xDE else 4), depth)
        if mark in (0xDC, 0xDD):
            return self._list(self._number(2 if mark == 0xDC else 4), depth)
        if mark in (0xD9, 0xDA, 0xDB):
            return self._text(self._number(1 << (mark - 0xD9)))
        if mark in _BINARY:
            return self._take(self._limited(self._number(_BINARY[mark])))
        # Extensions, with a fixed length or a length after the mark.
        if mark in (0xC7, 0xC8, 0xC9):
            return self._extension(self._number(1 << (mark - 0xC7)))
        if 0xD4 <= mark <= 0xD8:
            return self._extension(1 << (mark - 0xD4))
        raise self._error(f"unknown msgpack type {mark:#04x}")

    def _limited(self, n_bytes: int) -> int:
        """Return a length after checking that a text or bytes may be so long."""
        if n_bytes > _MAX_TEXT_BYTES:
            raise UnsupportedError(
                f"a value that is not an array is {n_bytes:,} bytes long; "
                f"the limit is {_MAX_TEXT_BYTES:,}",
                file=self._file,
            )
        return n_bytes

    def _text(self, n_bytes: int) -> str:
        """Read a string."""
        try:
            return self._take(self._limited(n_bytes)).decode()
        except UnicodeDecodeError as err:
            raise self._error("a string is not valid UTF-8") from err

    def _list(self, n_items: int, depth: int) -> list[object]:
        """Read an array of values; every value takes at least one byte."""
        if n_items > self._size - self.at:
            raise self._error(f"a list of {n_items:,} items extends past the end of the file")
        return [self.value(depth=depth + 1) for _ in range(n_items)]

    def _map(self, n_items: int, depth: int) -> object:
        """Read a map, or the chunked array that it stands for."""
        if 2 * n_items > self._size - self.at:
            raise self._error(f"a map of {n_items:,} entries extends past the end of the file")
        entries: dict[str, object] = {}
        for _ in range(n_items):
            name = self.value(depth=depth + 1)
            if isinstance(name, (int, float)) and not isinstance(name, bool):
                name = str(name)
            if not isinstance(name, str):
                raise self._error(f"a key of a map has the type {type(name).__name__}, not str")
            if name in entries:
                raise self._error(f"a map contains the key {name[:80]!r} twice")
            entries[name] = self.value(depth=depth + 1)
        return self._chunked(entries) if _CHUNKED in entries else entries

    def _extension(self, n_bytes: int) -> object:
        """Read an extension: an array, a scalar or a complex number."""
        kind = self._number(1)
        end = self.at + n_bytes
        if end > self._size:
            self._skip(n_bytes)
        if kind not in (_ARRAY, _COMPLEX, _SCALAR):
            raise UnsupportedError(
                f"msgpack extension type {kind} is not a Flax type",
                file=self._file,
                hint="write the file again with flax.serialization",
            )
        n_parts = self._number(1) - 0x90
        if kind == _COMPLEX:
            parts = [self.value(depth=_MAX_DEPTH) for _ in range(2)] if n_parts == 2 else []
            if [type(part) for part in parts] != [float, float] or self.at != end:
                raise self._error("a complex number is malformed")
            return complex(*(float(str(part)) for part in parts))
        return self._array(n_parts, end)

    def _array(self, n_parts: int, end: int) -> FlatPart:
        """Read shape and dtype of an array that ends at a byte, and skip its data."""
        shape = self.value(depth=_MAX_DEPTH - 1) if n_parts == 3 else None
        name = self.value(depth=_MAX_DEPTH) if n_parts == 3 else None
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        mark = self._number(1)
        if (
            not isinstance(shape, list)
            or not isinstance(name, str)
            or mark not in _BINARY
            or len(shape) > _MAX_RANK
            or any(type(extent) is not int or extent < 0 for extent in shape)
        ):
            raise self._error("an array is malformed")
        if name not in DTYPES:
            raise UnsupportedError(
                f"the dtype {name[:80]!r} is not supported",
                file=self._file,
                hint="save the array with a different dtype",
            )
        n_bytes = self._number(_BINARY[mark])
        expected = prod(shape) * itemsize(name)
        if n_bytes != expected:
            raise self._error(
                f"an array of dtype {name} and shape {shape!r:.80} has {n_bytes:,} bytes, not "
                f"{expected:,}"
            )
        part = FlatPart(name, tuple(shape), self._file, self._skip(n_bytes))
        if self.at != end:
            raise self._error("an array does not end where its extension ends")
        return part

    def _chunked(self, entries: Mapping[str, object]) -> ChunkedArray:
        """Return the array that a map of chunks stands for."""
        shape, chunks = _items(entries.get("shape")), _items(entries.get("chunks"))
        parts = tuple(chunk for chunk in chunks if isinstance(chunk, FlatPart))
        if (
            len(parts) != len(chunks)
            or len(shape) > _MAX_RANK
            or any(type(extent) is not int or extent < 0 for extent in shape)
            or len({part.dtype for part in parts}) != 1
            or any(len(part.shape) != 1 for part in parts)
        ):
            raise self._error("a chunked array is malformed")
        extents = tuple(int(str(extent)) for extent in shape)
        n_elements = sum(part.shape[0] for part in parts)
        if n_elements != prod(extents):
            raise self._error(
                f"the chunks of an array of shape {extents!r:.80} have {n_elements:,} elements "
                "in all"
            )
        return ChunkedArray(parts[0].dtype, extents, parts)


def _items(value: object) -> list[object]:
    """Return the items of a list, which flax stores as a map from "0", "1" … to them."""
    if not isinstance(value, dict):
        return []
    return [value.get(str(number)) for number in range(len(value))]


FORMAT = Format(
    name="flax",
    title="Flax msgpack",
    sniff=sniff,
    read=read,
    lay_out=None,
    aliases=("msgpack",),
    own_folders=no_folders,
    list_indexed=list_indexed,
)
