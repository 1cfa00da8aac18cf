"""Directories of zarr 2 arrays: Megatron-core's distributed checkpoints with backend ``zarr``, etc.

On disk::

    iter_0000010/
    ├── metadata.json                          {"sharded_backend": "zarr",
    │                                           "sharded_backend_version": 1, …}
    ├── common.pt                              common state (arguments, iteration …)
    ├── decoder.layers.mlp.linear_fc1.weight/  one directory per tensor (``zarr.metadata2``)
    │   ├── .zarray
    │   └── 0.0.0, 0.1.0 …                     plain chunks, one per layer and rank
    ├── optimizer.state.exp_avg.….sync/        left-over locks, empty files: ignored
    └── rng_state/
        └── shard_0.1_2.2.pt                   a ShardedObject: a torch file of its value

Versions: written by megatron-core up to 0.12 (seen: 0.12.1); later versions cannot read them.

The catalog has the schema of ``torch_dist``: a ShardedObject has the key
``rng_state/shard_0.1_2.2``, and its value is a list of one element. ``common``, ``args`` and
``iteration`` come from the common state.

zarr 2 hierarchies of other software, with nested groups and attributes (``.zattrs``), are read as
well; they have no common state and no objects. A tensor's key is its path, with ``/`` between
names. The files written are always those that Megatron would write.

Consolidated metadata (``.zmetadata``) is a list to compare with: an array in it without a directory
is missing, and an array that it lacks is read with a note.

An absent chunk is an error in Megatron's checkpoints, as Megatron writes all chunks; elsewhere it
is the fill value (``zarr.fill``).

Not supported, refused by name: what ``zarr.metadata2`` does not support; on writing, tensors whose
shards do not form a regular grid.

Source: megatron-core 0.12.1 with zarr 2.18.3, pinned in tests/golden (``mcore0121_zarr``);
``megatron/core/dist_checkpointing/strategies/{zarr,tensorstore}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsafeError,
    UnsupportedError,
    raising,
)
from core.files.json_object import read_json_object, read_small_file
from core.formats.format import MEGATRON_FOLDERS, Format, imported_on_call
from core.formats.mcore.common_state import (
    COMMON_FILE,
    common_image,
    common_state,
    read_common_file,
    with_common_state,
)
from core.formats.mcore.metadata_json import (
    BACKEND_KEY,
    CONFIG,
    config_image,
    names_backend,
    read_metadata_json,
    read_version,
)
from core.formats.torch.tree import load_object
from core.formats.torch.zip.tree_layout import plan_tree
from core.formats.zarr.array import check_stored_dtypes
from core.formats.zarr.chunks import folder_chunks
from core.formats.zarr.fill import lost_files
from core.formats.zarr.folder import (
    ZarrFolder,
    catalog_of_folders,
    chunk_files,
    lay_out_metadata,
    without_unread,
)
from core.formats.zarr.grid import ChunkNames, grid_of_pieces, is_like_a_chunk
from core.formats.zarr.metadata2 import (
    ARRAY_FILE,
    ATTRIBUTES_FILE,
    GROUP_FILE,
    parse_zarray,
    zarray,
)
from core.formats.zarr.tree import (
    ROOT_KEY,
    Listing,
    check_keys,
    compare_with_index,
    has_array_inside,
    path_in,
    walk_folders,
)
from core.megatron.extras.sharded_objects import is_sharded_object, shard_grids
from core.pickle.fields import mapping_or_empty

if TYPE_CHECKING:
    from core.engine.catalog.attributes import Attributes
    from core.files.store import ReadStore

_BACKEND = "zarr"
_FOREIGN = ("manifest.ocdbt", ".metadata", "zarr.json")
"""Files of formats that may look like this one."""
_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file next to the directories of the iterations."""
_OBJECT_FILE = re.compile(r"(shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*)\.pt$")
_CONSOLIDATED = ".zmetadata"
_MAX_ZARRAY_BYTES = 1 << 20
_MAX_VALUES = 16_000_000
"""Maximum number of JSON values in consolidated metadata."""
_MOST_REPORTED = 1000
"""Missing shards of one object that are reported."""
_RESERVED = frozenset((ARRAY_FILE, GROUP_FILE, ATTRIBUTES_FILE, CONFIG, COMMON_FILE))


def sniff(store: ReadStore) -> bool:
    """Return whether the directory is Megatron's with this backend, or another zarr 2 hierarchy."""
    if store.entry is not None or any(map(store.exists, _FOREIGN)):
        return False
    if store.exists(CONFIG):
        try:
            if read_metadata_json(store).get(BACKEND_KEY) == _BACKEND:
                return True
        except CorruptError:
            pass  # damaged: the other files decide
    return (
        store.exists(GROUP_FILE) or store.exists(ARRAY_FILE) or has_array_inside(store, ARRAY_FILE)
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of one iteration's directory, or of a zarr 2 hierarchy.

    Raises:
        CorruptError: ``metadata.json``, a ``.zarray`` or the common state is malformed, a chunk has
            the wrong length or is beyond its array.
        MissingShardError: ``metadata.json``, ``common.pt``, a ``.zarray``, a chunk or a shard of an
            object is missing.
        UnsupportedError: the backend or its version is not supported.
        UnsafeError: a pickle is hostile, or a name leads outside the directory.
    """
    return salvage(store, raising)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the catalog without the arrays and objects that are damaged.

    Args:
        store: the checkpoint.
        report: receives the problems.

    Raises:
        UnsafeError: an array is unsafe for another reason than pickles.
        CorruptError: the common state is not a dict.
    """
    # Only Megatron's checkpoints have a common state; only they are known to store every chunk.
    is_megatron = store.exists(COMMON_FILE) or names_backend(store)
    fills = not stores_every_chunk(store)
    lost = cache(partial(lost_files, store))
    common: object = None
    hidden: dict[str, StoredArray] = {}
    if is_megatron:
        try:
            read_version(store, backend=_BACKEND)
        except CheckpointingException as err:
            report(err)
        try:
            common, arrays_inside = read_common_file(store)
            hidden |= arrays_inside
        except CheckpointingException as err:
            report(err)
    folders: dict[str, ZarrFolder] = {}
    unread: dict[str, UnsupportedError | UnsafeError] = {}
    objects: dict[str, StoredObject] = {}
    groups: dict[str, Attributes] = {}
    stored: list[str] = []
    # Arrays are directories. Those that cannot be read become objects, so that the others can be
    # inspected.
    for folder, listing, is_array in walk_folders(
        store, is_array=lambda folder, listing: ARRAY_FILE in listing
    ):
        if is_array:
            stored.append(folder)
            key, file = folder or ROOT_KEY, path_in(folder, ARRAY_FILE)
            try:
                data = read_small_file(store, file, max_bytes=_MAX_ZARRAY_BYTES, key=key)
                attributes = _attributes_of(store, folder, listing)
                array = parse_zarray(data, file=file, key=key, attributes=attributes)
                chunks = folder_chunks(
                    store,
                    folder,
                    array,
                    key=key,
                    fill=array.fill if fills else None,
                    lost=lost,
                    listing=listing,
                )
                folders[key] = ZarrFolder(array, file, chunks)
            except (UnsupportedError, UnsafeError) as err:
                unread[key] = err
            except CheckpointingException as err:
                report(err)
        try:
            if not is_array:
                groups[folder] = _attributes_of(store, folder, listing)
            if folder and not is_array:
                _refuse_lost_metadata(store, folder, listing, is_megatron=is_megatron)
            for item, arrays_inside in (
                _read_objects(store, folder, listing) if is_megatron and folder else ()
            ):
                objects[item.key] = item
                hidden |= arrays_inside
        except CheckpointingException as err:
            report(err)
    notes = []
    if _CONSOLIDATED in store.files():
        notes = compare_with_index(
            _consolidated_arrays(store),
            stored,
            file=_CONSOLIDATED,
            marker=ARRAY_FILE,
            report=report,
        )
    # The key of a shard contains the shape of its grid: all shards of an object must exist.
    for grid in shard_grids(objects):
        for key in grid.absent_keys(_MOST_REPORTED):
            report(
                MissingShardError(
                    f"a shard of the object is missing; only {len(grid.offsets)} of "
                    f"{prod(grid.shape)} shards exist",
                    file=f"{key}.pt",
                    key=key,
                    hint="copy the checkpoint again, with all its files",
                )
            )
    catalog = catalog_of_folders(
        store, folders, format="zarr", version="2", objects=objects, attributes=groups
    )
    if is_megatron and common is not None:
        catalog = with_common_state(catalog, common, file=store.label)
    return without_unread(catalog.with_hidden(hidden).noted(notes), unread)


def _consolidated_arrays(store: ReadStore) -> list[str]:
    """Return the paths of the arrays in the consolidated metadata; [] if it is malformed."""
    try:
        entries = read_json_object(
            store, _CONSOLIDATED, max_bytes=256 << 20, max_values=_MAX_VALUES
        ).get("metadata")
    except CorruptError:
        return []  # every array has metadata of its own
    return [
        path.removesuffix(ARRAY_FILE).removesuffix("/")
        for path in mapping_or_empty(entries)
        if path == ARRAY_FILE or path.endswith(f"/{ARRAY_FILE}")
    ]


def _attributes_of(store: ReadStore, folder: str, listing: Listing) -> Attributes:
    """Return the attributes of an array or group; {} if it has none.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    if ATTRIBUTES_FILE not in listing:
        return {}
    return read_json_object(store, path_in(folder, ATTRIBUTES_FILE))


def stores_every_chunk(store: ReadStore) -> bool:
    """Return whether Megatron, which stores every chunk, wrote the directory.

    That is still recognized if the directory's own files are lost.
    """
    if store.exists(COMMON_FILE) or store.exists(CONFIG):
        return True
    root = getattr(store, "root", None)
    return root is not None and (root.resolve().parent / _TRACKER).exists()


def _refuse_lost_metadata(
    store: ReadStore, folder: str, listing: Listing, *, is_megatron: bool
) -> None:
    """Raise if a directory without a ``.zarray`` is what remains of an array.

    Raises:
        MissingShardError: the directory contains chunks, or is empty in a checkpoint of Megatron.
    """
    chunk = next(filter(is_like_a_chunk, listing), None)
    if chunk is not None:
        raise MissingShardError(
            f"{ARRAY_FILE} is missing next to the chunk {chunk}",
            file=f"{folder}/{ARRAY_FILE}",
            key=folder,
            hint="copy the checkpoint again, with all its files, including hidden ones",
        )
    # zarr 2 hierarchies of other software may have empty directories; Megatron creates none.
    if is_megatron and not listing and not store.folders(folder):
        raise MissingShardError(
            "the directory is empty",
            file=folder,
            key=folder,
            hint="copy the checkpoint again, with all its files",
        )


def _read_objects(
    store: ReadStore, folder: str, listing: Listing
) -> Iterator[tuple[StoredObject, Mapping[str, StoredArray]]]:
    """Yield the ShardedObjects in a directory, each with the arrays of the tensors inside it."""
    for name, size in sorted(listing.items()):
        match = _OBJECT_FILE.match(name)
        if match is not None:
            file, key = f"{folder}/{name}", f"{folder}/{match[1]}"
            value, arrays_inside = load_object(
                store, StoredArray(key, "uint8", (size,), Extent(file, 0)), key=key
            )
            yield StoredObject(key, value=[value]), arrays_inside


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Describe the files of one iteration's directory.

    These are the chunks and ``.zarray`` of every tensor, the objects, ``common.pt`` and
    ``metadata.json``, in this order.

    Args:
        target: the arrays of every tensor are equal boxes of a regular grid; each becomes a chunk.
            An object whose key is that of a ShardedObject becomes a file; any other goes into the
            common state, nested as in the skeleton.

    Raises:
        UnsupportedError: a tensor's arrays are not a grid, its key cannot be a directory name, zarr
            lacks its dtype, or an object has not been loaded.
    """
    check_keys(target.tensors, reserved=_RESERVED)
    check_stored_dtypes({key: tensor.dtype for key, tensor in target.tensors.items()})
    images: list[FileImage] = []
    for key, tensor in target.tensors.items():
        grid, arrays = grid_of_pieces(key, tensor.shape, target.fragments(key))
        text = zarray(grid, tensor.dtype, key=key)
        images.append(lay_out_metadata(f"{key}/{ARRAY_FILE}", text, grid, arrays))
        names = ChunkNames(len(tensor.shape), ".")
        images += (
            FileImage(path, array.n_bytes, (PlacedArray(0, array),))
            for path, array in chunk_files(key, names, grid, arrays)
        )
    # Objects with keys of other forms are part of the common state.
    for item in target.objects.values():
        if not is_sharded_object(item.key):
            continue
        if item.raw_key is not None or not isinstance(item.value, list) or len(item.value) != 1:
            raise UnsupportedError(
                "the object must be a list of one value to be stored as a ShardedObject",
                key=item.key,
            )
        prefix = item.key.rpartition("/")[2]
        plan = plan_tree(item.value[0], array_of=target.whole_array, prefix=prefix)
        images.append(plan.image(f"{item.key}.pt"))
    images.append(common_image(target, common_state(target)))
    # metadata.json comes last: its presence means that everything else is there.
    images.append(config_image(backend=_BACKEND, has_common_file=True, is_metadata=True))
    return images


FORMAT = Format(
    name="zarr",
    title="Megatron zarr (zarr 2)",
    sniff=sniff,
    read=read,
    salvage=salvage,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "zarr_open"),
    side_folders=MEGATRON_FOLDERS,
    partition="grid",
    has_common_state=True,
    megatron_name="zarr",
)
