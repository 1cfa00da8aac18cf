"""A zarr 3 group of arrays: one directory per tensor.

On disk::

    checkpoint.zarr/
    ├── zarr.json                       group; attributes {"ckpt": {"iteration": 10}, …}
    ├── ckpt-objects.pt                 objects that are not tensors, if any (``torch.side_file``)
    └── model.layers.0.mlp.weight/
        ├── zarr.json                   (``zarr.metadata3``)
        └── c/0/0, c/0/1 …              plain chunks; larger than 64 MiB: shards (``zarr.shards``)

A tensor's key is its path, with ``/`` between names; groups may be nested. Consolidated metadata is
a list to compare with: an array in it without a directory is missing, and an array that it lacks is
read with a note. An absent chunk is the fill value (``zarr.fill``); in a group
that this project wrote, recognized by the attribute "ckpt", it is an error.

The written chunks are the source's shards if these form a regular grid, else there is one chunk per
tensor. A chunk larger than 64 MiB is divided, inside its file, into bands of at most 16 MiB, for
readers that decode complete chunks; as the bands follow each other in C order, the data is still
one run of bytes.

Attributes (``core.engine.catalog.attributes``) of groups and arrays, and names of axes, are read
and written; those without a group are in the root's attribute "ckpt".

``Catalog.iteration`` is set if the root's attributes contain the iteration. Options for writing:
``iteration``, and ``WriteOptions.shard_bytes``: the size above which a chunk is divided (into bands
of at most a quarter of it).

Versions: zarr 3. zarr-python, up to 3.1.6, has no element types for bfloat16 and 8-bit floats,
under any name, and refuses such arrays; tensorstore opens them. A note is given when they are
written.

Not supported, refused by name: what ``zarr.metadata3`` does not support; on writing, tensors whose
shards do not form a regular grid.

Source: zarr 3 specification; groups written by zarr-python 3.1.6 and arrays by tensorstore 0.1.86.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.attributes import (
    ROOT,
    Attributes,
    AttributesByPath,
    parse_by_path,
    with_attributes,
)
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage, Literal, PlacedArray, literal_file
from core.engine.catalog.key_patterns import some_of
from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
    UnsafeError,
    UnsupportedError,
    raising,
)
from core.files.json_object import read_small_file
from core.formats.format import Format, imported_on_call
from core.formats.torch.side_file import (
    OBJECTS_FILE,
    objects_image,
    read_objects,
    with_objects_beside,
)
from core.formats.zarr.array import TENSORSTORE_ONLY, check_stored_dtypes
from core.formats.zarr.chunks import folder_chunks
from core.formats.zarr.fill import lost_files
from core.formats.zarr.folder import (
    ZarrFolder,
    catalog_of_folders,
    chunk_files,
    lay_out_metadata,
    without_unread,
)
from core.formats.zarr.grid import (
    ChunkGrid,
    ChunkNames,
    find_band_shape,
    grid_of_pieces,
    is_like_a_chunk,
)
from core.formats.zarr.metadata3 import (
    METADATA_FILE,
    array_json,
    attributes_in,
    group_json,
    node_of,
    parse_array,
)
from core.formats.zarr.shards import dense_index, index_bytes
from core.formats.zarr.tree import (
    ROOT_KEY,
    Listing,
    check_keys,
    compare_with_index,
    has_array_inside,
    path_in,
    walk_folders,
)
from core.pickle.fields import int_or_none, mapping_or_empty

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.file_image import CrcOf
    from core.engine.catalog.stored import PlannedArray
    from core.files.store import ReadStore

DEFAULT_SHARD_BYTES = 64 << 20
_BANDS_PER_SHARD = 4
"""Minimum number of bands of a shard."""
_MAX_INNER = 1 << 16
"""Maximum number of inner chunks of a shard; a chunk that needs more equal bands is not divided."""
_MAX_METADATA_BYTES = 256 << 20
_FOREIGN = ("manifest.ocdbt", ".metadata")
_RESERVED = frozenset((METADATA_FILE, OBJECTS_FILE, "c"))
_ATTRIBUTE, _BY_PATH = "ckpt", "attributes"
_CHUNK_FOLDERS = re.compile(r"((^|/)c)?((^|/)[0-9]+)*$")


def sniff(store: ReadStore) -> bool:
    """Return whether the directory or one of its first subdirectories has a ``zarr.json``."""
    if store.entry is not None or any(map(store.exists, _FOREIGN)):
        return False
    return store.exists(METADATA_FILE) or has_array_inside(store, METADATA_FILE)


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a group, or of a single array.

    Raises:
        CorruptError: a ``zarr.json`` is malformed, a chunk has the wrong length or is beyond its
            array.
        MissingShardError: a ``zarr.json`` or a chunk is missing.
        UnsupportedError: the version of a ``zarr.json`` is not 3, or an object is not supported.
        UnsafeError: a pickle is hostile, or a name leads outside the directory.
    """
    return salvage(store, raising)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the catalog without the arrays that are damaged.

    Args:
        store: the group.
        report: receives the problems.

    Raises:
        CheckpointingException: a ``zarr.json`` or the objects cannot be read, or are unsafe.
    """
    nodes: dict[str, dict[str, object]] = {}
    groups: dict[str, Attributes] = {}
    listed: list[str] = []

    # Whether a directory is an array depends on its metadata; keep that, to read it only once.
    def is_array(folder: str, listing: Listing) -> bool:
        nonlocal listed
        if METADATA_FILE not in listing:
            return False
        file = path_in(folder, METADATA_FILE)
        kind, metadata = node_of(
            read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES), file=file
        )
        if kind == "array":
            nodes[folder] = metadata
        else:
            groups[folder] = attributes_in(metadata, file=file)
            if not folder:
                listed = _consolidated_arrays(metadata)
        return kind == "array"

    # Arrays are directories. Those that cannot be read become objects, so that the others can be
    # inspected.
    folders: dict[str, ZarrFolder] = {}
    unread: dict[str, UnsupportedError | UnsafeError] = {}
    lost = cache(partial(lost_files, store))
    stored: list[str] = []
    for folder, listing, has_array in walk_folders(store, is_array=is_array):
        if not has_array:
            try:
                _refuse_lost_metadata(folder, listing)
            except CheckpointingException as err:
                report(err)
            continue
        stored.append(folder)
        key, file = folder or ROOT_KEY, path_in(folder, METADATA_FILE)
        try:
            array = parse_array(nodes.pop(folder), file=file, key=key)
        except (UnsupportedError, UnsafeError) as err:
            unread[key] = err
            continue
        except CheckpointingException as err:
            report(err)
            continue
        # This project stores every chunk.
        fill = array.fill if _own_attributes(groups) is None else None
        try:
            chunks = folder_chunks(
                store, folder, array, key=key, fill=fill, lost=lost, listing=listing
            )
        except CheckpointingException as err:
            report(err)
            continue
        folders[key] = ZarrFolder(array, file, chunks)
    notes = compare_with_index(
        listed, stored, file=METADATA_FILE, marker=METADATA_FILE, report=report
    )
    own = _own_attributes(groups) or {}
    root = {name: value for name, value in groups.pop(ROOT, {}).items() if name != _ATTRIBUTE}
    # Other software may have an attribute of that name.
    foreign = {name: value for name, value in own.items() if name not in ("iteration", _BY_PATH)}
    root |= {_ATTRIBUTE: foreign} if foreign else {}
    catalog = catalog_of_folders(
        store, folders, format="zarr3", version="3", attributes={ROOT: root, **groups}
    ).noted(notes)
    catalog = with_attributes(catalog, parse_by_path(own.get(_BY_PATH)) or {})
    catalog = replace(catalog, iteration=int_or_none(own.get("iteration")))
    return without_unread(with_objects_beside(catalog, read_objects(store)), unread)


def _consolidated_arrays(metadata: Mapping[str, object]) -> list[str]:
    """Return the paths of the arrays in a group's consolidated metadata; [] if it has none."""
    consolidated = mapping_or_empty(metadata.get("consolidated_metadata"))
    nodes = mapping_or_empty(consolidated.get("metadata"))
    return [
        path for path, node in nodes.items() if mapping_or_empty(node).get("node_type") == "array"
    ]


def _own_attributes(groups: AttributesByPath) -> Attributes | None:
    """Return this project's attributes of the root group; None in groups of other software.

    Args:
        groups: path of a group → its attributes.
    """
    own = groups.get(ROOT, {}).get(_ATTRIBUTE)
    return own if isinstance(own, dict) else None


def stores_every_chunk(store: ReadStore) -> bool:
    """Return whether this project, which stores every chunk, wrote the group.

    Raises:
        CheckpointingException: the group's metadata cannot be read.
    """
    if not store.exists(METADATA_FILE):
        return False
    kind, metadata = node_of(
        read_small_file(store, METADATA_FILE, max_bytes=_MAX_METADATA_BYTES), file=METADATA_FILE
    )
    attributes = attributes_in(metadata, file=METADATA_FILE)
    return kind == "group" and _own_attributes({ROOT: attributes}) is not None


def _refuse_lost_metadata(folder: str, listing: Listing) -> None:
    """Raise if a directory that is not an array is what remains of one.

    Raises:
        MissingShardError: the directory contains chunks.
    """
    chunk = next((name for name in listing if is_like_a_chunk(name) or name == "c"), None)
    if chunk is not None:
        array_folder = _CHUNK_FOLDERS.sub("", folder, count=1)
        raise MissingShardError(
            f"{METADATA_FILE} is missing for the chunk {folder}/{chunk}",
            file=path_in(array_folder, METADATA_FILE),
            key=array_folder or None,
            hint="copy the checkpoint again, with all its files",
        )


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Describe the files of a group.

    These are the ``zarr.json`` and the chunks of every tensor, those of the groups in between, the
    objects, and the root's ``zarr.json``, in this order.

    Args:
        target: the arrays of every tensor are equal boxes of a regular grid; each becomes a chunk
            or a shard.

    Raises:
        UnsupportedError: a tensor's arrays are not a grid, its key cannot be a directory name, zarr
            lacks its dtype, or an object has not been loaded.
    """
    shard_bytes = target.write.shard_bytes
    if shard_bytes is None:
        shard_bytes = DEFAULT_SHARD_BYTES
    images: list[FileImage] = []
    groups: dict[str, None] = {}
    check_keys(target.tensors, reserved=_RESERVED)
    check_stored_dtypes({key: tensor.dtype for key, tensor in target.tensors.items()})
    for key, tensor in target.tensors.items():
        # The directories on the way to an array are groups.
        parts = key.split("/")
        groups |= dict.fromkeys("/".join(parts[:depth]) for depth in range(1, len(parts)))
        grid, arrays = grid_of_pieces(key, tensor.shape, target.fragments(key))
        inner_shape = _inner_shape(grid, tensor.dtype, shard_bytes=shard_bytes)
        text = array_json(
            grid, tensor.dtype, inner_shape=inner_shape, key=key, attributes=tensor.attributes
        )
        images.append(lay_out_metadata(path_in(key, METADATA_FILE), text, grid, arrays))
        names = ChunkNames(len(tensor.shape), "/", has_prefix=True)
        images += (
            _chunk_image(path, array, inner_shape)
            for path, array in chunk_files(key, names, grid, arrays)
        )
    images += [
        literal_file(path_in(group, METADATA_FILE), group_json(target.attributes.get(group, {})))
        for group in groups
    ]
    objects = objects_image(target)
    if objects is not None:
        images.append(objects)
    # The root's metadata comes last. The attribute is written even if it is empty: it means that
    # every chunk is stored.
    has_iteration = target.iteration is not None and not target.write.is_release
    own: dict[str, object] = {"iteration": target.iteration} if has_iteration else {}
    # Attributes of what is no group here are among this project's own.
    root = dict(target.attributes.get(ROOT, {}))
    others = {
        path: dict(values)
        for path, values in target.attributes.items()
        if path != ROOT and path not in groups
    }
    if _ATTRIBUTE in root:
        others[ROOT] = {_ATTRIBUTE: root.pop(_ATTRIBUTE)}
    if others:
        own[_BY_PATH] = others
    images.append(
        literal_file(METADATA_FILE, group_json({**root, _ATTRIBUTE: own}), is_metadata=True)
    )
    return images


def _inner_shape(grid: ChunkGrid, dtype: str, *, shard_bytes: int) -> Shape | None:
    """Return the shape of the bands into which every chunk is cut; None if chunks are not cut.

    Args:
        shard_bytes: maximum size of a chunk that is not cut.
    """
    if 0 in grid.shape or prod(grid.chunk_shape) * itemsize(dtype) <= shard_bytes:
        return None
    inner_shape = find_band_shape(
        grid.chunk_shape, itemsize(dtype), most_bytes=max(shard_bytes // _BANDS_PER_SHARD, 1)
    )
    return inner_shape if ChunkGrid(grid.chunk_shape, inner_shape).n_chunks <= _MAX_INNER else None


def _chunk_image(path: str, array: PlannedArray, inner_shape: Shape | None) -> FileImage:
    """Return the layout of a chunk file: the dense elements and, for a shard, the index."""
    placed = (PlacedArray(0, array),)
    if inner_shape is None:
        return FileImage(path, array.n_bytes, placed)
    n_inner = ChunkGrid(array.shape, inner_shape).n_chunks

    def literals(crc_of: CrcOf) -> Iterator[Literal]:
        yield array.n_bytes, dense_index(n_inner, array.n_bytes // n_inner)

    return FileImage(path, array.n_bytes + index_bytes(n_inner, has_crc=True), placed, literals)


def notes_of(target: TargetCatalog) -> Sequence[str]:
    """Return a note on tensors whose element types only tensorstore supports."""
    keys = [key for key, tensor in target.tensors.items() if tensor.dtype in TENSORSTORE_ONLY]
    if not keys:
        return ()
    dtypes = ", ".join(dict.fromkeys(target.tensors[key].dtype for key in keys))
    note = (
        f"zarr-python (up to 3.1.6) has no data type for {dtypes} ({some_of(keys)}); TensorStore "
        "can open these arrays, and so can zarr-python after import "
        "core.dist_checkpointing.strategies.zarr_types"
    )
    return (note,)


FORMAT = Format(
    name="zarr3",
    title="zarr 3 group",
    sniff=sniff,
    read=read,
    salvage=salvage,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "zarr3_open"),
    keeps_attributes=True,
    partition="grid",
    has_objects_beside=True,
    notes_of=notes_of,
)
