"""``zarr.json``, the metadata of a zarr 3 array or group.

On disk::

    <group>/
    ├── zarr.json      {"zarr_format": 3, "node_type": "group", "attributes": {…}}
    └── <array>/
        ├── zarr.json  {"zarr_format": 3, "node_type": "array",
        │               "shape": [384, 64], "data_type": "bfloat16", "fill_value": 0.0,
        │               "chunk_grid":
        │                   {"name": "regular", "configuration": {"chunk_shape": [192, 64]}},
        │               "chunk_key_encoding":
        │                   {"name": "default", "configuration": {"separator": "/"}},
        │               "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
        └── c/0/0, c/1/0 …  chunks, stored in full also if they reach beyond the array;
                            or shards (``zarr.shards``)

Versions: 3 (specification 3.0 and 3.1).

Source: zarr 3 specification; arrays written by zarr-python 3.1.6 and tensorstore 0.1.86.

Not supported, refused by name: irregular grids, storage transformers, extension data types, codecs
around a shard, nested shards, compressed shard indexes, and codecs that ``zarr.decode`` does not
decode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.attributes import DIMENSIONS, is_axis_names
from core.errors import UNLIKE_ANY_WRITER, CorruptError, UnsupportedError, suggesting
from core.files.json_object import parse_json_object
from core.formats.zarr.array import (
    OTHER_VERSION,
    PICKLE_CODECS,
    Sharding,
    ZarrArray,
    checked_grid,
    checked_order,
    pickled_array,
    required,
    v3_dtype,
    v3_fill_value,
    v3_spelling,
)
from core.formats.zarr.decode import ChunkCoding
from core.formats.zarr.fill import fill_bytes
from core.formats.zarr.grid import ChunkNames
from core.pickle.fields import FieldReader, list_or_empty, mapping_or_empty

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.formats.zarr.grid import ChunkGrid

METADATA_FILE = "zarr.json"
_MAX_VALUES = 16_000_000
"""Maximum number of JSON values; a group with consolidated metadata of 10⁵ arrays has 4 · 10⁶."""
_SHARDING = "sharding_indexed"
_KNOWN = frozenset(
    (
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "codecs",
        "fill_value",
        "attributes",
        "dimension_names",
        "storage_transformers",
    )
)
"""Members that the specification defines; others are extensions."""

Config = Mapping[str, object]


@suggesting(UNLIKE_ANY_WRITER)
def node_of(data: bytes, *, file: str) -> tuple[str, dict[str, object]]:
    """Parse a ``zarr.json`` into the kind of its node, ``array`` or ``group``, and its content.

    Raises:
        CorruptError: the file is malformed.
        UnsupportedError: the version is not 3.
    """
    metadata = parse_json_object(data, file=file, max_values=_MAX_VALUES)
    version = required(metadata, "zarr_format", file=file)
    if version != 3:
        raise UnsupportedError(
            f"zarr_format is {version!r:.40}, not 3", file=file, hint=OTHER_VERSION
        )
    kind = required(metadata, "node_type", file=file)
    if kind not in ("array", "group"):
        raise CorruptError(
            f"node_type is {str(kind)[:40]!r}; expected 'array' or 'group'", file=file
        )
    return str(kind), metadata


@suggesting(UNLIKE_ANY_WRITER)
def parse_array(metadata: Config, *, file: str, key: str) -> ZarrArray:
    """Parse the metadata of an array.

    Args:
        metadata: content of its ``zarr.json``.
        file, key: name of that file and of the tensor, for messages.

    Raises:
        CorruptError: the metadata is malformed.
        UnsupportedError: an extension, grid, naming, data type or chain of codecs is not supported.
        UnsafeError: the chunks are pickles.
    """
    # Refuse extensions, unless they declare that readers may ignore them. Unknown codecs are
    # refused later, when data is requested; ones that unpickle are refused here.
    for name, value in metadata.items():
        if name not in _KNOWN and not (
            isinstance(value, dict) and value.get("must_understand") is False
        ):
            raise UnsupportedError(
                f"the array's field {name[:80]!r} is not supported", file=file, key=key
            )
    if metadata.get("storage_transformers"):
        raise UnsupportedError("storage transformers are not supported", file=file, key=key)
    if _unpickles(metadata.get("codecs")):
        raise pickled_array(file, key)
    # Parse the element type, the grid and the names of chunks.
    dtype = v3_dtype(required(metadata, "data_type", file=file), file=file, key=key)
    reader = FieldReader(file)
    shape = reader.read_shape(required(metadata, "shape", file=file), "shape")
    kind, config = _name_and_config(
        required(metadata, "chunk_grid", file=file), "chunk_grid", file=file
    )
    if kind != "regular":
        raise UnsupportedError(f"the chunk grid {kind!r} is not supported", file=file, key=key)
    chunk_shape = reader.read_shape(config.get("chunk_shape"), "chunk_shape", least=1)
    grid = checked_grid(shape, chunk_shape, dtype, file=file)
    names = _chunk_names(required(metadata, "chunk_key_encoding", file=file), len(shape), file=file)
    # The codec of shards divides chunks into inner chunks, and contains their codecs.
    codecs = _codec_list(required(metadata, "codecs", file=file), "codecs", file=file)
    fill = fill_bytes(metadata.get("fill_value"), dtype, zarr_format=3)
    attributes = attributes_in(metadata, file=file)
    if is_axis_names(metadata.get("dimension_names"), len(shape)):
        attributes = {**attributes, DIMENSIONS: metadata["dimension_names"]}
    if _SHARDING in dict(codecs):
        sharding = _sharding(codecs, dtype, chunk_shape, file=file, key=key)
        return ZarrArray(dtype, grid, names, sharding.inner, sharding, fill, attributes)
    coding = _coding(codecs, dtype, chunk_shape, file=file, key=key)
    return ZarrArray(dtype, grid, names, coding, fill=fill, attributes=attributes)


def attributes_in(metadata: Config, *, file: str) -> Config:
    """Return the attributes of a node.

    Raises:
        CorruptError: they are not an object.
    """
    return FieldReader(file).read_names(metadata.get("attributes") or {}, "attributes")


def _unpickles(codecs: object) -> bool:
    """Return whether one of the codecs, or of those inside a shard's codec, unpickles."""
    for codec in list_or_empty(codecs):
        name = codec.get("name") if isinstance(codec, dict) else codec
        config = mapping_or_empty(mapping_or_empty(codec).get("configuration"))
        if isinstance(name, str) and name in PICKLE_CODECS:
            return True
        if any(map(_unpickles, (config.get("codecs"), config.get("index_codecs")))):
            return True
    return False


def _name_and_config(value: object, subject: str, *, file: str) -> tuple[str, Config]:
    """Parse an extension point, an object or its bare name, into name and configuration.

    Args:
        subject: name of the value, for messages.

    Raises:
        CorruptError: the value has no name.
    """
    if isinstance(value, str):
        return value[:80], {}
    name = value.get("name") if isinstance(value, dict) else None
    config = value.get("configuration", {}) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(config, dict):
        raise CorruptError(f"{subject} has no name: {str(value)[:80]}", file=file)
    return name[:80], config


def _codec_list(value: object, subject: str, *, file: str) -> list[tuple[str, Config]]:
    """Parse a list of codecs into the name and configuration of each.

    Raises:
        CorruptError: the value is not a list of codecs, or is empty.
    """
    if not isinstance(value, list) or not value:
        raise CorruptError(f"{subject} is not a list of codecs", file=file)
    return [_name_and_config(item, "a codec", file=file) for item in value]


def _chunk_names(value: object, rank: int, *, file: str) -> ChunkNames:
    """Parse the encoding of chunk keys, zarr's name for the paths of chunks.

    Raises:
        CorruptError: the separator is neither a dot nor a slash.
        UnsupportedError: the encoding is neither ``default`` nor ``v2``.
    """
    kind, config = _name_and_config(value, "chunk_key_encoding", file=file)
    if kind not in ("default", "v2"):
        raise UnsupportedError(f"the chunk key encoding {kind!r} is not supported", file=file)
    separator = config.get("separator", "/" if kind == "default" else ".")
    if separator not in (".", "/"):
        raise CorruptError(
            f"the chunk key separator is {str(separator)[:40]!r}; expected '.' or '/'",
            file=file,
        )
    return ChunkNames(rank, str(separator), has_prefix=kind == "default")


def _coding(
    codecs: list[tuple[str, Config]], dtype: str, shape: Shape, *, file: str, key: str
) -> ChunkCoding:
    """Parse a chain of codecs: transposes, then ``bytes``, then codecs from bytes to bytes.

    Args:
        shape: shape of a chunk, in elements.

    Raises:
        CorruptError: a transpose or a byte order is malformed.
        UnsupportedError: the chain has another form.
    """
    # Every transpose reorders the axes that the one before it produced.
    order = tuple(range(len(shape)))
    remaining = list(codecs)
    while remaining and remaining[0][0] == "transpose":
        _, config = remaining.pop(0)
        axes = config.get("order")
        if axes in ("C", "F"):  # drafts of the specification had these names
            axes = list(range(len(shape)))[:: 1 if axes == "C" else -1]
        order = tuple(order[axis] for axis in checked_order(axes, len(shape), file=file))
    if not remaining or remaining[0][0] != "bytes":
        raise UnsupportedError(
            f"the codec chain {_chain(codecs)} is not supported, because 'bytes' must follow the "
            "transposes",
            file=file,
            key=key,
        )
    # Types of one byte need no byte order.
    _, config = remaining.pop(0)
    endian, has_order = config.get("endian"), itemsize(dtype) > 1
    if endian not in ("little", "big", None):
        raise CorruptError(f"endian is {str(endian)[:40]!r}; expected 'little' or 'big'", file=file)
    if endian is None and has_order:
        raise CorruptError(
            f"the codec 'bytes' does not specify the byte order of {dtype}", file=file
        )
    codec_names = tuple(name for name, _ in remaining)
    return ChunkCoding(dtype, shape, order, endian == "big" and has_order, codec_names)


def _chain(codecs: list[tuple[str, Config]]) -> str:
    """Join the names of codecs, for messages."""
    return " → ".join(name for name, _ in codecs)


def _sharding(
    codecs: list[tuple[str, Config]], dtype: str, shard_shape: Shape, *, file: str, key: str
) -> Sharding:
    """Parse the codec of shards.

    Args:
        codecs: the codecs of the array, one of which is that of shards.
        shard_shape: shape of a chunk of the array's grid, in elements.

    Raises:
        CorruptError: the configuration is malformed, or inner chunks do not divide the shards.
        UnsupportedError: the codec is combined with others, nested, or has an unusual index.
    """
    # Codecs before or after that of the shards would make partial reads impossible.
    if len(codecs) != 1:
        raise UnsupportedError(
            f"codecs before or after the sharding codec ({_chain(codecs)}) are not supported",
            file=file,
            key=key,
        )
    # The inner chunks.
    config = codecs[0][1]
    inner_shape = FieldReader(file).read_shape(
        config.get("chunk_shape"), "chunk_shape of the shards", least=1
    )
    if len(inner_shape) != len(shard_shape) or any(
        extent % part for extent, part in zip(shard_shape, inner_shape, strict=True)
    ):
        raise CorruptError(
            f"inner chunks of shape {list(inner_shape)} do not evenly divide shards of shape "
            f"{list(shard_shape)}",
            file=file,
        )
    inner_codecs = _codec_list(config.get("codecs"), "codecs of the shards", file=file)
    if _SHARDING in dict(inner_codecs):
        raise UnsupportedError("shards within shards are not supported", file=file, key=key)
    # The index: its length must be predictable to find it, so that compression is out of question.
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise CorruptError(
            f"index_location is {str(location)[:40]!r}; expected 'start' or 'end'", file=file
        )
    index_codecs = _codec_list(config.get("index_codecs"), "index_codecs", file=file)
    names = [name for name, _ in index_codecs]
    is_little_endian = index_codecs[0][1].get("endian") == "little"
    if names not in (["bytes"], ["bytes", "crc32c"]) or not is_little_endian:
        raise UnsupportedError(
            f"a shard index with the codecs {_chain(index_codecs)} is not supported",
            file=file,
            key=key,
        )
    coding = _coding(inner_codecs, dtype, inner_shape, file=file, key=key)
    return Sharding(coding, has_crc="crc32c" in names, is_index_first=location == "start")


def array_json(
    grid: ChunkGrid,
    dtype: str,
    *,
    inner_shape: Shape | None,
    key: str,
    attributes: Config | None = None,
) -> bytes:
    """Return the ``zarr.json`` of an array of plain chunks.

    Args:
        inner_shape: shape of the inner chunks if every chunk of the grid is a shard, else None.
        attributes: attributes of the array, the names of its axes among them; None without any.

    Raises:
        UnsupportedError: zarr has no such element type.
    """
    spelling = v3_spelling(dtype, key=key)
    text = _json_of_spelling(grid.shape, grid.chunk_shape, inner_shape, dtype, spelling)
    if not attributes:
        return text
    metadata = {**json.loads(text), "attributes": dict(attributes)}
    if is_axis_names(attributes.get(DIMENSIONS), len(grid.shape)):
        metadata["dimension_names"] = metadata["attributes"].pop(DIMENSIONS)
    return json.dumps(metadata, indent=2).encode()


@lru_cache(maxsize=1024)
def _json_of_spelling(
    shape: Shape, chunk_shape: Shape, inner_shape: Shape | None, dtype: str, spelling: str
) -> bytes:
    """Return a ``zarr.json``. It is kept: encoding with an indent is slow, and layers are alike."""
    # Plain little-endian elements; in shards also, with the index after them and its CRC.
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[object] = [plain]
    if inner_shape is not None:
        config = {
            "chunk_shape": list(inner_shape),
            "codecs": [plain],
            "index_codecs": [plain, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": _SHARDING, "configuration": config}]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": spelling,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": v3_fill_value(dtype),
        "codecs": codecs,
        "attributes": {},
        "storage_transformers": [],
    }
    return json.dumps(metadata, indent=2).encode()


def group_json(attributes: Config) -> bytes:
    """Return the ``zarr.json`` of a group."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return json.dumps(metadata, indent=2).encode()
