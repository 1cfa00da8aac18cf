"""Laying out an Orbax checkpoint: zarr 2 arrays in an OCDBT database with one version.

On disk (for a step of ``CheckpointManager``, all but ``_CHECKPOINT_METADATA`` in ``default/``)::

    new/
    ├── commit_success.txt     the save has finished; a step has another one in ``default/``
    ├── _CHECKPOINT_METADATA   which handler restores the item, and custom metadata
    ├── array_metadatas/process_0, _sharding   of typed random keys, if there are any
    ├── _METADATA              the tree (``core.formats.ocdbt.leaves``)
    ├── _strings.json          values of strings, if there are any
    ├── d/<32 hex digits>      data files: the chunks of arrays, uncompressed, one after another
    ├── d/<32 hex digits>      the nodes; numbers and the arrays' metadata are stored in them
    └── manifest.ocdbt

A tensor is one run of bytes in a data file. One of more than 64 MiB is cut into bands of rows, each
a chunk of that run, so that no reader has to hold the complete tensor. zarr stores chunks in full,
so the run of a tensor whose rows are not a multiple of the band ends with zeros.

Only typed random keys have a sharding: Orbax restores arrays to the devices that the target tree of
``restore`` names.

On ``gs://``, where directories are not renamed, Orbax takes a step without ``commit_success.txt``
for an unfinished one (0.12.3 and newer write the file everywhere). The names of data files do not
depend on the time or on chance.

Source: see ``core.formats.ocdbt.format``; restored by orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.catalog.attributes import BY_PATH, ROOT, collect_attributes
from core.catalog.catalog import TargetCatalog
from core.catalog.file_image import FileImage, PlacedArray, literal_file
from core.errors import UnsupportedError
from core.formats.ocdbt.entries import MANIFEST
from core.formats.ocdbt.leaves import WrittenLeaf, is_random_key, leaves_to_write, tree_json
from core.formats.ocdbt.node_writer import encode_database
from core.formats.ocdbt.nodes import ValueLocation
from core.formats.ocdbt.tree import (
    ARRAY_METADATA,
    CHECKPOINT,
    CUSTOM,
    ITERATION,
    METRICS,
    RANDOM_KEY,
    SHARDING,
    STRINGS,
    TREE,
    encode_sharding_name,
)
from core.formats.zarr.grid import ChunkGrid, ChunkNames, row_bands
from core.formats.zarr.metadata2 import ARRAY_FILE, zarray
from core.formats.zarr.tree import check_keys

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.stored import PlannedArray

COMMIT_SUCCESS = "commit_success.txt"
_COMMITTED = b"Checkpoint commit was successful"
_ANY_DEVICE = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
"""The sharding of a typed key whose source names no device: Orbax demands one."""
DEFAULT_FILE_BYTES = 2 << 30
"""Orbax's own default for data files."""
STEP_ITEM = "default"
"""The directory of the only item of a step, as ``CheckpointManager`` names it."""
_MAX_CHUNK_BYTES = 64 << 20
_MAX_CHUNKS = 1 << 16
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Describe the files of an Orbax checkpoint.

    Of the options, ``WriteOptions.max_file_bytes``, ``shard_bytes`` (maximum size of a chunk) and
    ``is_step`` are used.

    Args:
        target: every tensor is one array; objects are ``storable``.

    Raises:
        UnsupportedError: a tensor's key or dtype cannot be stored, two entries have the same name,
            or there is neither a tensor nor a number.
    """
    leaves = leaves_to_write(target)
    names_of_leaves = dict.fromkeys(leaf.name for leaf in leaves)
    check_keys(names_of_leaves, reserved=frozenset(), are_files=False)
    root = f"{STEP_ITEM}/" if target.write.is_step else ""
    max_chunk_bytes = target.write.shard_bytes or _MAX_CHUNK_BYTES

    # Place the arrays in data files, and list their chunks and the numbers in the database.
    files = _DataFiles(root, target.write.max_file_bytes or DEFAULT_FILE_BYTES)
    values: dict[str, bytes | ValueLocation] = {}
    for leaf in leaves:
        if leaf.scalar is not None:
            dtype, data = leaf.scalar
            values[f"{leaf.name}/{ARRAY_FILE}"] = zarray(ChunkGrid((), ()), dtype, key=leaf.name)
            values[f"{leaf.name}/0"] = data
        if leaf.tensor_key is None:
            continue
        meta = target.meta(leaf.tensor_key)
        chunk_shape = _chunk_shape(meta.shape, itemsize(meta.dtype), max_bytes=max_chunk_bytes)
        grid = ChunkGrid(meta.shape, chunk_shape)
        values[f"{leaf.name}/{ARRAY_FILE}"] = zarray(grid, meta.dtype, key=leaf.tensor_key)
        chunk_bytes = prod(grid.chunk_shape) * itemsize(meta.dtype)
        n_chunks = 0 if 0 in meta.shape else grid.n_chunks
        path, offset = files.place(target.whole_array(leaf.tensor_key), n_chunks * chunk_bytes)
        names = ChunkNames(len(meta.shape), ".")
        for number, index in enumerate(grid.indices()):
            values[f"{leaf.name}/{names.name(index)}"] = ValueLocation(
                "", path, offset + number * chunk_bytes, chunk_bytes
            )

    if not values:
        raise UnsupportedError(
            "Orbax has nothing to store: there is neither a tensor nor a number",
            hint="write a format that keeps other entries: --to torch or --to dcp",
        )

    # The other files. The manifest comes last, as it makes the checkpoint recognisable.
    node_file = _data_name("nodes")
    nodes, manifest = encode_database(values, file=node_file)
    strings = {leaf.name: leaf.string for leaf in leaves if leaf.string is not None}
    images = [*files.images(), literal_file(root + node_file, nodes)]
    if strings:
        images.append(literal_file(root + STRINGS, json.dumps(strings).encode()))
    images += _random_key_files(leaves, target, root)
    images.append(literal_file(root + TREE, tree_json(leaves, target), is_metadata=True))
    images.append(literal_file(root + MANIFEST, manifest, is_metadata=True))
    images.append(literal_file(CHECKPOINT, _checkpoint_json(target, leaves), is_metadata=True))
    images += [
        literal_file(folder + COMMIT_SUCCESS, _COMMITTED, is_metadata=True)
        for folder in dict.fromkeys((root, ""))
    ]
    return images


def _random_key_files(
    leaves: Sequence[WrittenLeaf], target: TargetCatalog, root: str
) -> list[FileImage]:
    """Lay out the files that make arrays typed random keys; none without such keys."""
    rows, shardings = [], {}
    for leaf in leaves:
        if leaf.tensor_key is None or not is_random_key(leaf, target):
            continue
        meta = target.meta(leaf.tensor_key)
        attributes = meta.attributes or {}
        facts = {
            "param_name": leaf.name,
            "write_shape": list(meta.shape),
            "chunk_shape": list(meta.shape),
            "ext_metadata": {RANDOM_KEY: attributes[RANDOM_KEY]},
        }
        rows.append({"array_metadata": facts})
        shardings[encode_sharding_name(leaf.name)] = str(attributes.get(SHARDING, _ANY_DEVICE))
    if not rows:
        return []
    arrays = json.dumps({"array_metadatas": rows}).encode()
    return [
        literal_file(f"{root}{ARRAY_METADATA}/process_0", arrays),
        literal_file(root + SHARDING, json.dumps(shardings).encode()),
    ]


def _chunk_shape(shape: Shape, itemsize: int, *, max_bytes: int) -> Shape:
    """Return the shape of the chunks of a tensor that is stored as one run of bytes.

    Args:
        shape: shape of the tensor, in elements.
        itemsize: bytes per element.
        max_bytes: maximum size of a chunk, unless rows are longer.
    """
    if 0 in shape or prod(shape) * itemsize <= max_bytes:
        return tuple(max(n, 1) for n in shape)
    # Along the first axis that has more than one element, the last band may be padded.
    axis = next(axis for axis, extent in enumerate(shape) if extent > 1)
    row_bytes = prod(shape[axis + 1 :]) * itemsize
    if row_bytes <= max_bytes:
        n_bands = -(-shape[axis] // (max_bytes // row_bytes))
        return (1,) * axis + (-(-shape[axis] // n_bands), *shape[axis + 1 :])
    # Rows of more than the maximum are cut into equal bands, if there are any of useful size.
    bands = row_bands(shape, itemsize, most_bytes=max_bytes)
    return bands if ChunkGrid(shape, bands).n_chunks <= _MAX_CHUNKS else shape


class _DataFiles:
    """The data files of a database, filled one after another.

    Args:
        root: directory of the database; "" or ends with "/".
        max_bytes: size above which the next file is started.
    """

    def __init__(self, root: str, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._arrays: list[list[PlacedArray]] = []
        self._sizes: list[int] = []

    def place(self, array: PlannedArray, n_bytes: int) -> tuple[str, int]:
        """Add an array that takes ``n_bytes`` bytes; return its data file and offset."""
        if not self._sizes or 0 < self._sizes[-1] > self._max_bytes - n_bytes:
            self._arrays.append([])
            self._sizes.append(0)
        offset = self._sizes[-1]
        self._arrays[-1].append(PlacedArray(offset, array))
        self._sizes[-1] += n_bytes
        return _data_name(len(self._sizes) - 1), offset

    def images(self) -> Iterator[FileImage]:
        """Yield the files."""
        for number, (size, arrays) in enumerate(zip(self._sizes, self._arrays, strict=True)):
            yield FileImage(self._root + _data_name(number), size, arrays)


def _data_name(seed: object) -> str:
    """Return the path of a data file, named as tensorstore names them."""
    return f"d/{hashlib.blake2b(f'ckpt {seed}'.encode(), digest_size=16).hexdigest()}"


def _checkpoint_json(target: TargetCatalog, leaves: Sequence[WrittenLeaf]) -> bytes:
    """Return the content of ``_CHECKPOINT_METADATA``, without the times, which would differ."""
    # Attributes of tensors, and of containers that Orbax does not have, are custom metadata.
    written: dict[str, tuple[str, ...]] = {CHECKPOINT: (METRICS,), TREE: (CUSTOM,)}
    for leaf in leaves:
        if leaf.tensor_key is not None and is_random_key(leaf, target):
            written[leaf.tensor_key] = (RANDOM_KEY, SHARDING)
    others = {}
    for path, values in collect_attributes(target).items():
        names = written.get(path, ())
        remaining = {name: value for name, value in values.items() if name not in names}
        if remaining and path != ROOT:
            others[path] = remaining
    custom = {**target.attributes.get(ROOT, {}), **({BY_PATH: others} if others else {})}
    if target.iteration is not None:
        custom[ITERATION] = target.iteration
    metadata = {
        "item_handlers": {STEP_ITEM: _HANDLER} if target.write.is_step else _HANDLER,
        "metrics": target.attributes.get(CHECKPOINT, {}).get(METRICS, {}),
        "performance_metrics": {},
        "init_timestamp_nsecs": None,
        "commit_timestamp_nsecs": None,
        "custom_metadata": custom,
    }
    return json.dumps(metadata).encode()
