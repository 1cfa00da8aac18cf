"""flax's msgpack files: ``flax_model.msgpack``, and what ``flax.serialization.to_bytes`` returns.

On disk (a directory has one of the first two, or is given as the file itself)::

    flax_model.msgpack                       one file
    flax_model-00001-of-00002.msgpack …      pieces, whose trees are merged, with
    flax_model.msgpack.index.json            {"weight_map": {"model/embed/kernel": "flax_model-…"}}
    checkpoint_10                            flax.training.checkpoints, opened as a file

``core.formats.flax.scanner`` describes the content of a file. Lists, tuples and NamedTuples are
maps whose keys are ``"0"``, ``"1"`` … or the fields' names, so they come back as dicts. Arrays are
byte ranges of the file.

``Catalog.iteration`` is set from an integer called ``step``.

Versions: flax 0.12; earlier ones write the same files.

Not supported: writing; arrays of types that ``core.arrays.dtypes`` does not list (strings, objects,
``V2`` of very old files), which are refused by name.

Source: files written by flax 0.12.8 (``flax/serialization.py``); names of pieces as transformers 4
writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from core.arrays.box import boxes_of_flat_range, full_box
from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog, StoredObject
from core.catalog.stored import Extent, StoredArray, array_name
from core.catalog.tensor import Fragment, Tensor
from core.errors import CorruptError, MissingShardError
from core.files.json_object import read_json_object
from core.files.store import check_name
from core.formats.flax.scanner import ChunkedArray, FlatPart, Scanner
from core.formats.format import Format, no_folders
from core.formats.huggingface.index import list_indexed
from core.formats.missing_entries import report_missing
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import Path, join_path, nest_leaves

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
            raise CorruptError("the msgpack is not a map of entries", file=file)
        if scanner.at != store.size(file):
            raise CorruptError(
                f"{store.size(file) - scanner.at} bytes follow the end of the msgpack", file=file
            )
        for path, leaf in _leaves(tree, ()):
            if path in leaves:
                raise CorruptError("two pieces hold this entry", file=file, key=join_path(path))
            leaves[path] = leaf
    names = {"/".join(map(str, path)) for path in leaves} if listed else set()
    for name, file in listed.items():
        if name not in names:
            report_missing(
                MissingShardError(
                    f"{INDEX} lists the entry in this file, but it is missing there",
                    file=file,
                    key=name,
                    hint="files of two checkpoints may be mixed: copy one of them into an empty "
                    "directory",
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
    meta = catalog.tensors.get("step")
    if meta is not None and meta.shape == () and dtype_of(meta.dtype).kind in ("int", "uint"):
        array = catalog.fragments("step")[0].array
        assert array is not None
        data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
        number = int.from_bytes(data, "little", signed=dtype_of(meta.dtype).kind == "int")
    return number if type(number) is int and 0 <= number < _MAX_ITERATION else None


FORMAT = Format(
    name="flax",
    title="flax msgpack",
    sniff=sniff,
    read=read,
    lay_out=None,
    aliases=("msgpack",),
    own_folders=no_folders,
    list_indexed=list_indexed,
)
