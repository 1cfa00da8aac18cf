"""Laying out an Orbax checkpoint: zarr 2 arrays in an OCDBT database with one version.

On disk (for a step of ``CheckpointManager``, all but ``_CHECKPOINT_METADATA`` in ``default/``)::

    new/
    ├── commit_success.txt     the save has finished; a step has another one in ``default/``
    ├── _CHECKPOINT_METADATA   which handler restores the item, and custom metadata
    ├── array_metadatas/process_0, _sharding   of typed random keys, if there are any
    ├── _METADATA              the tree (``core.formats.ocdbt.write``)
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

The leaves of an Orbax tree are arrays, numbers, strings, None and empty containers. A leaf is named
by its path, joined by dots, as Orbax names it. Orbax restores tuples and NamedTuples as lists and
dicts, and the keys of dicts as strings.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.attributes import BY_PATH, ROOT, collect_attributes
from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray, literal_file
from core.engine.catalog.key_patterns import rename_hint
from core.engine.catalog.removal import drop_entries
from core.errors import UnsupportedError
from core.formats.ocdbt.entries import MANIFEST
from core.formats.ocdbt.node_writer import encode_database
from core.formats.ocdbt.nodes import ValueLocation
from core.formats.ocdbt.tree import (
    ARRAY_METADATA,
    CHECKPOINT,
    CUSTOM,
    ITERATION,
    LIST_INDEX_KEY,
    METRICS,
    NAME_KEY,
    RANDOM_KEY,
    SHARDING,
    STRING,
    STRINGS,
    TREE,
    encode_sharding_name,
)
from core.formats.zarr.array import check_stored_dtypes
from core.formats.zarr.grid import ChunkGrid, ChunkNames, find_band_shape
from core.formats.zarr.metadata2 import ARRAY_FILE, zarray
from core.formats.zarr.tree import check_keys
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.key_text import describe_key, faithful_text
from core.pickle.nesting import ListIndex, Path, entries, join_path
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.catalog import AnyCatalog, Catalog
    from core.engine.catalog.stored import PlannedArray

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
    check_stored_dtypes({key: tensor.dtype for key, tensor in target.tensors.items()})
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
        tensor = target.tensor(leaf.tensor_key)
        chunk_shape = _chunk_shape(tensor.shape, itemsize(tensor.dtype), max_bytes=max_chunk_bytes)
        grid = ChunkGrid(tensor.shape, chunk_shape)
        values[f"{leaf.name}/{ARRAY_FILE}"] = zarray(grid, tensor.dtype, key=leaf.tensor_key)
        chunk_bytes = prod(grid.chunk_shape) * itemsize(tensor.dtype)
        n_chunks = 0 if 0 in tensor.shape else grid.n_chunks
        path, offset = files.place(target.whole_array(leaf.tensor_key), n_chunks * chunk_bytes)
        names = ChunkNames(len(tensor.shape), ".")
        for number, index in enumerate(grid.indices()):
            values[f"{leaf.name}/{names.name(index)}"] = ValueLocation(
                "", path, offset + number * chunk_bytes, chunk_bytes
            )

    if not values:
        raise UnsupportedError(
            "there is nothing to store with Orbax, because the source has neither tensors nor "
            "numbers",
            hint="write a format that keeps other entries, such as --to torch or --to dcp",
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
        tensor = target.tensor(leaf.tensor_key)
        attributes = tensor.attributes or {}
        facts = {
            "param_name": leaf.name,
            "write_shape": list(tensor.shape),
            "chunk_shape": list(tensor.shape),
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
    bands = find_band_shape(shape, itemsize, most_bytes=max_bytes)
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


_SCALAR = "scalar"
_ARRAY, _JAX_ARRAY = "np.ndarray", "jax.Array"
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class WrittenLeaf:
    """A leaf of the tree to write.

    Args:
        path: path in the tree; list indexes are ``ListIndex``, everything else is text.
        kind: type of its value, as Orbax names it.
        value: key of the tensor in the catalog if the leaf is an array, else the value itself.
    """

    path: Path
    kind: str
    value: object

    @property
    def name(self) -> str:
        """Name of the leaf, unique in the tree."""
        return ".".join(map(str, self.path))

    @property
    def tensor_key(self) -> str | None:
        """Key of the leaf's tensor in the catalog; None if the leaf is not an array."""
        return str(self.value) if self.kind == _ARRAY else None

    @property
    def scalar(self) -> tuple[str, bytes] | None:
        """Dtype and little-endian bytes of a number; None for any other leaf."""
        if self.kind != _SCALAR:
            return None
        if isinstance(self.value, bool):
            return "bool", bytes((self.value,))
        if isinstance(self.value, int):
            return "int64", self.value.to_bytes(8, "little", signed=True)
        return "float64", struct.pack("<d", self.value)

    @property
    def string(self) -> str | None:
        """Text of a string; None for any other leaf."""
        return str(self.value) if self.kind == STRING else None


def storable(catalog: Catalog) -> Catalog:
    """Return the catalog without the objects that cannot be leaves, which are listed as dropped."""
    dropped: dict[str, str] = {}
    for key, item in catalog.objects.items():
        problem = _problem(item.value)
        inside = {node.key for node in walk(item.value) if isinstance(node, TensorLeaf)}
        if problem is None and inside != {
            leaf.tensor_key for leaf in _leaves_below(item.value, (key,)) if leaf.kind == _ARRAY
        }:
            problem = "dict attributes"
        if problem is not None:
            dropped[key] = f"Orbax trees cannot contain {problem}"
    return drop_entries(catalog, dropped)


def _problem(value: object) -> str | None:
    """Return what in a value cannot be a leaf; None if all of it can."""
    if value is None or isinstance(value, (bool, float, str, TensorLeaf)):
        return None
    if isinstance(value, int):
        return None if _MIN_INT <= value <= _MAX_INT else "integers of more than 64 bits"
    mapping = as_mapping(value)
    if mapping is not None:
        if any(faithful_text(key) is None for key in mapping):
            return "dicts with these kinds of keys"
        return next(filter(None, map(_problem, mapping.values())), None)
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_problem, value)), None)
    return getattr(value, "class_name", None) or type(value).__name__


def leaves_to_write(catalog: AnyCatalog) -> list[WrittenLeaf]:
    """Return all leaves in the order of the catalog.

    Args:
        catalog: a target; its objects passed ``storable``. An entry whose key is not its path in
            the skeleton, joined by dots, is placed at the root, under its key.

    Raises:
        UnsupportedError: two leaves have the same name.
    """
    paths: dict[str, Path] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            if isinstance(entry.leaf, (TensorLeaf, ObjectLeaf)) or entry.key in catalog.objects:
                if join_path(entry.path) == entry.key:
                    paths[entry.key] = tuple(
                        part if isinstance(part, ListIndex) else describe_key(part)
                        for part in entry.path
                    )
    leaves = [WrittenLeaf(paths.get(key, (key,)), _ARRAY, key) for key in catalog.tensors]
    for key, item in catalog.objects.items():
        leaves += _leaves_below(item.value, paths.get(key, (key,)))
    names: set[str] = set()
    for leaf in leaves:
        if leaf.name in names:
            raise UnsupportedError(
                "two entries have this name when their paths are joined with dots",
                key=leaf.name,
                hint=rename_hint([leaf.name]),
            )
        names.add(leaf.name)
    return leaves


def _leaves_below(value: object, path: Path) -> Iterator[WrittenLeaf]:
    """Yield the leaves of a value that has passed ``storable``."""
    mapping = as_mapping(value)
    if mapping:
        for key, item in mapping.items():
            yield from _leaves_below(item, (*path, describe_key(key)))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _leaves_below(item, (*path, ListIndex(index)))
    elif isinstance(value, TensorLeaf):
        yield WrittenLeaf(path, _ARRAY, value.key)
    elif mapping is not None:
        yield WrittenLeaf(path, "Dict", {})
    elif isinstance(value, (list, tuple)):
        yield WrittenLeaf(path, "List" if isinstance(value, list) else "Tuple", value)
    elif value is None:
        yield WrittenLeaf(path, "None", None)
    else:
        yield WrittenLeaf(path, STRING if isinstance(value, str) else _SCALAR, value)


def is_random_key(leaf: WrittenLeaf, catalog: AnyCatalog) -> bool:
    """Return whether a leaf is a typed random key, which only jax arrays can be."""
    tensor = None if leaf.tensor_key is None else catalog.tensor(leaf.tensor_key)
    if tensor is None or tensor.dtype != "uint32":
        return False
    return isinstance((tensor.attributes or {}).get(RANDOM_KEY), str)


def tree_json(leaves: Sequence[WrittenLeaf], catalog: AnyCatalog) -> bytes:
    """Return the content of ``_METADATA``."""
    rows = {}
    for leaf in leaves:
        value: dict[str, object] = {
            "value_type": _JAX_ARRAY if is_random_key(leaf, catalog) else leaf.kind,
            "skip_deserialize": leaf.kind not in (_ARRAY, _SCALAR, STRING),
        }
        if leaf.tensor_key is not None:
            value["write_shape"] = list(catalog.tensor(leaf.tensor_key).shape)
        rows[str(tuple(map(str, leaf.path)))] = {
            "key_metadata": [
                {
                    "key": str(part),
                    "key_type": LIST_INDEX_KEY if isinstance(part, ListIndex) else NAME_KEY,
                }
                for part in leaf.path
            ],
            "value_metadata": value,
        }
    metadata = {
        "tree_metadata": rows,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": catalog.attributes.get(TREE, {}).get(CUSTOM),
    }
    return json.dumps(metadata).encode()
