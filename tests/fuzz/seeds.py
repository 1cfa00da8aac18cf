"""Where fuzzing begins: the small files of real checkpoints, taken apart as the targets need
them.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from core.errors import CheckpointingException
from core.files.store import LocalStore
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.reading.stored_metadata import metadata_of
from core.formats.ocdbt.nodes import MANIFEST_MAGIC, NODE_MAGIC, UnfoldBudget, unwrap
from tests.fuzz.targets import TARGETS

MAX_BYTES = 16 << 10
_PER_TARGET = 40


def seeds_of(name: str, golden: Path) -> list[bytes]:
    """Different inputs for a target, the smallest first.

    Args:
        golden: a directory of real checkpoints.
    """
    target = TARGETS[name]
    seeds = set(target.made)
    for pattern in target.seeds:
        for path in golden.rglob(pattern if pattern != "data.pkl" else "*.pt"):
            if path.is_file() and path.stat().st_size <= 16 * MAX_BYTES:
                seeds.update(_parts(name, path.read_bytes(), path))
    seeds.update(_OTHERS.get(name, lambda golden: iter(()))(golden))
    return sorted(
        (seed for seed in seeds if len(seed) <= MAX_BYTES), key=lambda seed: (len(seed), seed)
    )[:_PER_TARGET]


def words_of(seeds: list[bytes]) -> list[bytes]:
    """Words that stand in the seeds, for a fuzzer's dictionary."""
    words = {word for seed in seeds for word in re.findall(rb"[A-Za-z_][A-Za-z0-9_./]{2,23}", seed)}
    return sorted(words, key=lambda word: (len(word), word))[:400]


def _parts(name: str, data: bytes, path: Path) -> Iterator[bytes]:
    if name == "torch_pickle":
        yield from _pickles(path)
    elif name == "ocdbt":
        yield from _bodies(data, MANIFEST_MAGIC, b"\0")
    else:
        yield data


def _pickles(path: Path) -> Iterator[bytes]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (
                archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")
            )


def _bodies(data: bytes, magic: int, kind: bytes) -> Iterator[bytes]:
    """The body of an OCDBT file, inflated, marked as not compressed."""
    try:
        yield kind + b"\0\0" + unwrap(data, magic, UnfoldBudget())
    except CheckpointingException:
        return


def _items(golden: Path) -> Iterator[bytes]:
    """Items of DCP checkpoints."""
    for path in sorted(golden.glob("torch_dcp/*/.metadata"))[:4]:
        store = LocalStore(path.parent)
        try:
            metadata = metadata_of(store)
            for key in list(metadata.tensors)[:8]:
                for _, item in metadata.chunks(key):
                    if item.n_bytes <= MAX_BYTES:
                        yield store.read(item.file, item.offset, item.n_bytes)
        except CheckpointingException:
            continue
        finally:
            store.close()


def _nodes(golden: Path) -> Iterator[bytes]:
    """B-tree nodes out of the data files of OCDBT databases."""
    mark = re.compile(re.escape(NODE_MAGIC.to_bytes(4, "big")))
    for path in golden.glob("orbax/**/d/*"):
        data = path.read_bytes()
        for match in mark.finditer(data):
            length = int.from_bytes(data[match.start() + 4 : match.start() + 12], "little")
            yield from _bodies(data[match.start() : match.start() + length], NODE_MAGIC, b"\1")


def _chunks(golden: Path) -> Iterator[bytes]:
    """Compressed chunks of the size that the target has."""
    import zstandard

    plain = bytes(range(128))
    yield b"\0" + gzip.compress(plain)
    yield b"\1" + zlib.compress(plain)
    yield b"\3" + zstandard.compress(plain)
    yield b"\4" + zstandard.compress(plain)
    yield b"\5" + zstandard.compress(gzip.compress(plain))
    yield b"\6" + plain


def _small_metadata(golden: Path) -> Iterator[bytes]:
    """.metadata of a few tensors and an object; the real ones are large."""
    chunks = [
        ChunkRow((0, 0), (2, 3), "__0_0.distcp", 0, 400),
        ChunkRow((2, 0), (2, 3), "__1_0.distcp", 0, 400),
    ]
    rows = [TensorRow("w", "float32", (4, 3), chunks), TensorRow("b", "bfloat16", (), [])]
    yield write_metadata(rows, planner_data={"w": ("w",), "b": ("b",)})
    yield write_metadata(
        [*rows[:1], ObjectRow("o", "__0_0.distcp", 400, 30)],
        planner_data={"w": ("w",), "o": ("o", 1)},
    )
    yield write_metadata(
        rows[:1], planner_data=None, attributes={"mcore_data": {"w": {"a": (1, 2)}}}
    )


def _small_pickles(golden: Path) -> Iterator[bytes]:
    """Every opcode that Python writes."""
    shared = [1, 2]
    values = [
        {"a": [1, 2.5, None, True], (1, "b"): {3}},
        [shared, shared],
        b"ab",
        "\u20ac",
        1 << 70,
        -5,
        Path("a/b"),
        1j,
    ]
    values += [
        {"o": collections.OrderedDict(a=1)},
        collections.Counter("aab"),
        bytearray(b"x"),
        frozenset("ab"),
        len,
    ]
    for protocol in range(6):
        yield from (pickle.dumps(value, protocol) for value in values)


def _small_torch(golden: Path) -> Iterator[bytes]:
    """Files of torch.save, both kinds."""
    import torch

    matrix = torch.arange(12.0).reshape(3, 4)
    values = [
        matrix,
        {"w": matrix, "t": matrix.t(), "n": {"x": [matrix[1], 5]}, "p": torch.nn.Parameter(matrix)},
        {},
    ]
    for value in values:
        for is_zip in (True, False):
            file = io.BytesIO()
            torch.save(value, file, _use_new_zipfile_serialization=is_zip)
            yield file.getvalue()


def _small_torch_pickles(golden: Path) -> Iterator[bytes]:
    for data in _small_torch(golden):
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                yield from (
                    archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")
                )


def _arrays(golden: Path) -> Iterator[bytes]:
    """zarr.json of arrays with more in them than ours."""
    base = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [
            {"name": "transpose", "configuration": {"order": [1, 0]}},
            {"name": "bytes", "configuration": {"endian": "little"}},
        ],
    }
    yield json.dumps(base).encode()
    yield json.dumps(
        {**base, "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, "gzip"]}
    ).encode()


def _manifests(golden: Path) -> Iterator[bytes]:
    files = [{"path": "model.pt", "size": 1234, "crc32": "89abcdef"}]
    array = {
        "key": "w",
        "name": "w",
        "file": "model.pt",
        "offset": 64,
        "dtype": "float32",
        "shape": [2, 3],
    }
    arrays = [array | {"crc32": "89abcdef", "digest": "0" * 32}]
    head = {
        "schema": "ckpt-manifest",
        "tool": "t",
        "digest": "xxh3-128/1MiB",
        "files": files,
        "arrays": arrays,
    }
    for version in (1, 2):
        yield json.dumps(
            {**head, "version": version, "fingerprints": {"scheme": "fp1", "tensors": {}}}
        ).encode()


_OTHERS = {
    "dcp_item": _items,
    "dcp_metadata": _small_metadata,
    "pickle": _small_pickles,
    "torch_pickle": _small_torch_pickles,
    "zip": _small_torch,
    "legacy": _small_torch,
    "ocdbt": _nodes,
    "zarr_chunk": _chunks,
    "zarr3": _arrays,
    "manifest": _manifests,
}
