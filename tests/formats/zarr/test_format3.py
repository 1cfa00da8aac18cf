"""zarr 3 groups: written for zarr-python and tensorstore, read from them, broken."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr as zarr_python

from core.arrays.checksum import crc32c
from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.stored import PlannedArray
from core.errors import CorruptError, MissingShardError, TruncatedError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.dcp import torch_dist
from core.formats.zarr import format3 as zarr3
from core.formats.zarr.array import TENSORSTORE_ONLY, ZarrArray
from core.formats.zarr.metadata3 import node_of, parse_array
from core.verbs.convert.run import Job, run
from tests.support import forked
from tests.support.materialize import tensor_bytes
from tests.support.zarr_files import (
    as_bytes,
    by_tensorstore,
    element_bytes,
    files_of,
    source_of,
    written,
)

Shape = tuple[int, ...]

TYPES = [
    name
    for name, dtype in DTYPES.items()
    if dtype.kind != "bits" and name not in ("complex32", "float4_e2m1fn_x2")
]
KNOWN_TO_ZARR_PYTHON = [name for name in TYPES if name not in TENSORSTORE_ONLY]
SHAPES: dict[str, Shape] = {
    "scalar": (),
    "one": (1,),
    "row": (7,),
    "square": (6, 10),
    "deep": (2, 3, 4),
}


def read(folder: Path) -> tuple[Catalog, LocalStore]:
    store = LocalStore(folder)
    return zarr3.FORMAT.read(store), store


# ---- writing


def test_tensorstore_reads_every_type_and_shape_that_we_write(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{name}": (dtype, shape) for dtype in TYPES for name, shape in SHAPES.items()
    }
    source, store = source_of(tensors, chunks={f"{dtype}.square": (3, 5) for dtype in TYPES})
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    for key, (dtype, shape) in tensors.items():
        assert (
            by_tensorstore(folder / key, "zarr3").tobytes()
            == element_bytes(key, dtype, shape).tobytes()
        ), key
    chunks = {name for name in files_of(folder / "bfloat16.square") if name != "zarr.json"}
    assert chunks == {"c/0/0", "c/0/1", "c/1/0", "c/1/1"}


def test_zarr_python_reads_what_we_write_in_the_types_that_it_knows(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{name}": (dtype, shape)
        for dtype in KNOWN_TO_ZARR_PYTHON
        for name, shape in SHAPES.items()
    }
    source, store = source_of(tensors)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    group = zarr_python.open_group(folder, mode="r", zarr_format=3)
    assert set(group.array_keys()) == set(tensors)
    for key, (dtype, shape) in tensors.items():
        array: Any = group[key]
        assert array.dtype == np.dtype(dtype)
        assert as_bytes(array[...]).tobytes() == element_bytes(key, dtype, shape).tobytes(), key


SHARDED: dict[str, tuple[str, Shape]] = {
    "rows": ("float32", (24, 10)),
    "prime": ("float32", (23, 10)),
    "wide": ("bfloat16", (2, 3, 200)),
    "flat": ("int64", (96,)),
    "small": ("float32", (4,)),
}


def test_large_pieces_become_shards_that_others_read(tmp_path: Path) -> None:
    source, store = source_of(SHARDED, chunks={"rows": (12, 10)})
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours", shard_bytes=160)
    for key, (dtype, shape) in SHARDED.items():
        expected = element_bytes(key, dtype, shape).tobytes()
        assert by_tensorstore(folder / key, "zarr3").tobytes() == expected, key
        if dtype != "bfloat16":
            opened: Any = zarr_python.open_array(folder / key, mode="r", zarr_format=3)
            assert as_bytes(opened[...]).tobytes() == expected, key
            assert (opened.shards is not None) == (key != "small")
    inner = {
        key: json.loads((folder / key / "zarr.json").read_bytes())["codecs"][0][
            "configuration"
        ].get("chunk_shape")
        for key in SHARDED
    }
    assert inner == {
        "rows": [1, 10],
        "prime": [1, 10],
        "wide": [1, 1, 20],
        "flat": [4],
        "small": None,
    }


def test_a_shard_that_we_wrote_is_one_run_of_bytes_again(tmp_path: Path) -> None:
    source, store = source_of(SHARDED, chunks={"rows": (12, 10)})
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours", shard_bytes=160)
    catalog, ours = read(folder)
    for key, (dtype, shape) in SHARDED.items():
        fragments = catalog.fragments(key)
        assert len(fragments) == (2 if key == "rows" else 1)
        for fragment in fragments:
            assert fragment.array is not None
            assert (fragment.array.extent.offset, fragment.array.extent.encoding) == (0, None)
        assert (
            tensor_bytes(catalog, ours, key).tobytes() == element_bytes(key, dtype, shape).tobytes()
        )
    again = written(catalog, ours, zarr3.FORMAT, tmp_path / "again", shard_bytes=160)
    assert files_of(again) == files_of(folder)


def test_the_index_of_a_64_mib_piece_stands_behind_its_data() -> None:
    array = PlannedArray("w", "bfloat16", (8192, 8192))
    images = {
        image.path: image
        for image in zarr3.lay_out(catalog_of_arrays(format="zarr3", arrays={"w": array}))
    }
    image = images["w/c/0/0"]
    ((offset, index),) = image.literals(lambda name: 0)
    assert (image.arrays[0].offset, offset, image.size) == (0, 1 << 27, (1 << 27) + 8 * 16 + 4)
    assert np.frombuffer(index[:-4], "<u8").reshape(8, 2).tolist() == [
        [n << 24, 1 << 24] for n in range(8)
    ]
    assert images["w/zarr.json"].size < 1 << 12


def test_a_piece_without_few_equal_bands_is_not_sharded() -> None:
    array = PlannedArray("w", "uint8", ((1 << 27) - 39,))  # a prime
    images = {
        image.path: image
        for image in zarr3.lay_out(catalog_of_arrays(format="zarr3", arrays={"w": array}))
    }
    assert images["w/c/0"].size == array.n_bytes


def test_the_group_comes_last_and_notes_the_iteration(tmp_path: Path) -> None:
    source, store = source_of({"w": ("float32", (2, 3))}, iteration=7)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    root = json.loads((folder / "zarr.json").read_bytes())
    assert root == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"ckpt": {"iteration": 7}},
    }
    assert read(folder)[0].iteration == 7
    images = zarr3.lay_out(
        catalog_of_arrays(format="zarr3", arrays={"w": PlannedArray("w", "float32", (2, 3))})
    )
    assert [image.path for image in images] == ["w/zarr.json", "w/c/0/0", "zarr.json"]
    assert [image.is_metadata for image in images] == [False, False, True]


def test_objects_lie_beside_the_arrays(tmp_path: Path) -> None:
    source, store = source_of({"w": ("float32", (2,))}, objects={"lr": 0.5, "names": ["a", "b"]})
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    catalog, _ = read(folder)
    assert {key: item.value for key, item in catalog.objects.items()} == {
        "lr": 0.5,
        "names": ["a", "b"],
    }


def test_keys_with_slashes_are_groups_in_groups(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, Shape]] = {
        "model/w": ("int32", (3,)),
        "model/deep/w": ("int32", (4,)),
    }
    source, store = source_of(tensors)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    opened: Any = zarr_python.open_group(folder, mode="r")["model/deep/w"]
    assert as_bytes(opened[...]).tobytes() == element_bytes("model/deep/w", "int32", (4,)).tobytes()
    assert set(read(folder)[0].tensors) == set(tensors)


def test_tensors_without_elements_are_kept(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, Shape]] = {"a": ("bfloat16", (0, 4)), "b": ("int64", (3, 0))}
    source, store = source_of(tensors)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    assert by_tensorstore(folder / "b", "zarr3").shape == (3, 0, 8)
    catalog, ours = read(folder)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in catalog.tensors.items()} == tensors
    assert files_of(written(catalog, ours, zarr3.FORMAT, tmp_path / "again")) == files_of(folder)


@pytest.mark.parametrize(
    "key", ["a//b", "../a", ".hidden", "c", "a/c", "zarr.json", "ckpt-objects.pt", "w/x", "x" * 300]
)
def test_keys_that_are_no_directory_are_refused(key: str) -> None:
    arrays = {name: PlannedArray(name, "float32", (2,)) for name in ("w", key)}
    with pytest.raises(UnsupportedError, match="--rename"):
        zarr3.lay_out(catalog_of_arrays(format="zarr3", arrays=arrays))


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2"])
def test_types_that_zarr_has_not_are_refused_with_a_way_out(dtype: str) -> None:
    target = catalog_of_arrays(format="zarr3", arrays={"w": PlannedArray("w", dtype, (2,))})
    with pytest.raises(UnsupportedError, match=dtype) as caught:
        zarr3.lay_out(target)
    assert caught.value.hint == "write a different format with --to"


def test_a_checkpoint_of_megatron_becomes_zarr_3(golden: Path, tmp_path: Path) -> None:
    store = LocalStore(golden / "mcore0121_torch_dist" / "moe_seq" / "tp2_pp2_ep2" / "iter_0000010")
    source = torch_dist.FORMAT.read(store)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    assert source.tensors
    for key in source.tensors:
        assert (
            by_tensorstore(folder / key, "zarr3").tobytes()
            == tensor_bytes(source, store, key).tobytes()
        ), key


# ---- reading what others wrote

CODECS: dict[str, list[dict[str, Any]]] = {
    "plain": [],
    "crc32c": [{"name": "crc32c"}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "zstd+crc32c": [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
    "blosc": [
        {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 2},
        }
    ],
}
ORDERS: dict[str, list[dict[str, Any]]] = {
    "c": [],
    "f": [{"name": "transpose", "configuration": {"order": [2, 1, 0]}}],
    "cycle": [{"name": "transpose", "configuration": {"order": [2, 0, 1]}}],
    "twice": [
        {"name": "transpose", "configuration": {"order": [2, 0, 1]}},
        {"name": "transpose", "configuration": {"order": [1, 0, 2]}},
    ],
}


def made_by_tensorstore(folder: Path, dtype: str, metadata: dict[str, Any]) -> bytes:
    """An array of shape (7, 5, 6), and its bytes."""
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{folder}/",
        "metadata": {"shape": [7, 5, 6], **metadata},
    }
    array = ts.open(spec, create=True, dtype=ts.dtype(dtype)).result()
    values = (np.arange(7 * 5 * 6).reshape(7, 5, 6) % 200 + 1).astype(array.dtype.numpy_dtype)
    array.write(values).result()
    return values.tobytes()


@pytest.mark.each_value
@pytest.mark.parametrize("is_sharded", [False, True], ids=["chunks", "shards"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("codec", CODECS)
def test_what_tensorstore_writes_is_read(
    tmp_path: Path, codec: str, order: str, is_sharded: bool
) -> None:
    for dtype in ("bfloat16", "float8_e5m2", "int32"):
        for endian in ("little", "big"):
            codecs = [
                *ORDERS[order],
                {"name": "bytes", "configuration": {"endian": endian}},
                *CODECS[codec],
            ]
            if dtype == "float8_e5m2":
                codecs[len(ORDERS[order])] = {"name": "bytes"}
            metadata: dict[str, Any] = {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 5, 4]}},
                "codecs": codecs,
            }
            if is_sharded:
                config = {
                    "chunk_shape": [2, 5, 2],
                    "codecs": codecs,
                    "index_location": "start" if endian == "big" else "end",
                }
                metadata["codecs"] = [{"name": "sharding_indexed", "configuration": config}]
            expected = made_by_tensorstore(tmp_path / f"{dtype}.{endian}", dtype, metadata)
            catalog, store = read(tmp_path)
            assert tensor_bytes(catalog, store, f"{dtype}.{endian}").tobytes() == expected
            encoded = codec != "plain" or (endian == "big" and dtype != "float8_e5m2")
            for fragment in catalog.fragments(f"{dtype}.{endian}"):
                assert fragment.array is not None
                assert (fragment.array.extent.encoding is not None) == encoded
    folder = written(*read(tmp_path), zarr3.FORMAT, tmp_path / "ours")
    for name in ("bfloat16.little", "int32.big"):
        assert (
            by_tensorstore(folder / name, "zarr3").tobytes()
            == by_tensorstore(tmp_path / name, "zarr3").tobytes()
        )


@pytest.mark.parametrize(
    "encoding",
    [
        {"name": "default"},
        {"name": "default", "configuration": {"separator": "."}},
        {"name": "v2"},
        {"name": "v2", "configuration": {"separator": "/"}},
    ],
    ids=str,
)
def test_every_encoding_of_chunk_keys_is_read(tmp_path: Path, encoding: dict[str, Any]) -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [3, 5, 4]}}
    expected = made_by_tensorstore(
        tmp_path / "w", "int16", {"chunk_grid": grid, "chunk_key_encoding": encoding}
    )
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/scalar/",
        "metadata": {"chunk_key_encoding": encoding, "shape": []},
    }
    ts.open(spec, create=True, dtype=ts.int8).result().write(5).result()
    catalog, store = read(tmp_path)
    assert tensor_bytes(catalog, store, "w").tobytes() == expected
    assert tensor_bytes(catalog, store, "scalar").tobytes() == b"\5"


@pytest.mark.parametrize("compressors", ["auto", None])
@pytest.mark.parametrize("shards", [None, (4, 6)])
def test_groups_that_zarr_python_writes_are_read(
    tmp_path: Path, compressors: Any, shards: Any
) -> None:
    values = {
        dtype: (np.arange(70).reshape(7, 10) % 2 + 1).astype(dtype)
        for dtype in ("f4", "i8", "c16", "u2", "f2")
    }
    root = zarr_python.open_group(tmp_path / "g", mode="w", zarr_format=3)
    for dtype, value in values.items():
        array: Any = root.create_group(f"group.{dtype}").create_array(
            "w", shape=(7, 10), chunks=(2, 3), shards=shards, dtype=dtype, compressors=compressors
        )
        array[...] = value
    scalar: Any = root.create_array("scalar", shape=(), dtype="i8")
    scalar[...] = 7
    with pytest.warns(UserWarning, match="Consolidated"):
        zarr_python.consolidate_metadata(tmp_path / "g")
    folder = tmp_path / "g"
    assert zarr3.FORMAT.sniff(LocalStore(folder))
    catalog, store = read(folder)
    for dtype, value in values.items():
        assert tensor_bytes(catalog, store, f"group.{dtype}/w").tobytes() == value.tobytes()
    assert tensor_bytes(catalog, store, "scalar").tobytes() == np.int64(7).tobytes()
    copied = written(catalog, store, zarr3.FORMAT, tmp_path / "ours")
    for dtype, value in values.items():
        assert by_tensorstore(copied / f"group.{dtype}" / "w", "zarr3").tobytes() == value.tobytes()


def test_a_single_array_is_a_tensor_called_array(tmp_path: Path) -> None:
    array: Any = zarr_python.create_array(
        tmp_path / "one", shape=(4,), chunks=(2,), dtype="i4", compressors=None
    )
    array[:] = [1, 2, 3, 4]
    catalog, store = read(tmp_path / "one")
    assert list(catalog.tensors) == ["array"]
    assert tensor_bytes(catalog, store, "array").tobytes() == np.array([1, 2, 3, 4], "i4").tobytes()


def test_plain_groups_are_read_without_heavy_modules(tmp_path: Path) -> None:
    source, store = source_of(SHARDED)
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours", shard_bytes=160)
    code = (
        "import sys; from pathlib import Path; from core.files.store import LocalStore;"
        " from core.formats.zarr import format3 as zarr3;"
        "catalog = zarr3.FORMAT.read(LocalStore(Path(sys.argv[1])));"
        "fragments = [catalog.fragments(key) for key in catalog.tensors];"
        "heavy = {'torch', 'numpy', 'zarr', 'tensorstore', 'numcodecs', 'zstandard'} & "
        "set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )


@pytest.mark.parametrize("name", ["manifest.ocdbt", ".metadata"])
def test_directories_of_other_formats_are_not_claimed(tmp_path: Path, name: str) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "zarr.json").write_text("{}")
    assert zarr3.FORMAT.sniff(LocalStore(tmp_path))
    (tmp_path / name).write_bytes(b"x")
    assert not zarr3.FORMAT.sniff(LocalStore(tmp_path))


# ---- broken files

PLAIN: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
SHARDS: dict[str, Any] = {
    "chunk_shape": [2, 3],
    "codecs": [PLAIN],
    "index_codecs": [PLAIN, {"name": "crc32c"}],
    "index_location": "end",
}
GOOD: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 6],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 3]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "fill_value": 0,
    "codecs": [PLAIN],
    "attributes": {},
}


def parsed(**changes: object) -> ZarrArray:
    metadata = {name: value for name, value in {**GOOD, **changes}.items() if value != "absent"}
    kind, node = node_of(json.dumps(metadata).encode(), file="w/zarr.json")
    assert kind == "array"
    return parse_array(node, file="w/zarr.json", key="w")


def sharded(**changes: object) -> list[object]:
    config = {name: value for name, value in {**SHARDS, **changes}.items() if value != "absent"}
    return [{"name": "sharding_indexed", "configuration": config}]


def test_the_good_ones_are_good() -> None:
    assert parsed().grid.counts == (1, 2)
    assert parsed(codecs=sharded()).sharding is not None
    assert parsed(chunk_key_encoding="default", codecs=[PLAIN, "crc32c"]).coding.codecs == (
        "crc32c",
    )
    extra = {"consolidated_metadata": {"must_understand": False}, "dimension_names": ["a", None]}
    assert parsed(**extra).names.has_prefix


@pytest.mark.parametrize(
    "changes",
    [
        {"zarr_format": "absent"},
        {"node_type": "absent"},
        {"node_type": "thing"},
        {"shape": "absent"},
        {"shape": [4, -6]},
        {"shape": [4, 6.5]},
        {"shape": [4]},
        {"shape": [10**300, 6]},
        {"data_type": "absent"},
        {"chunk_grid": "absent"},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}},
        {"chunk_grid": {"name": "regular"}},
        {"chunk_grid": {"name": "regular", "configuration": 7}},
        {"chunk_grid": 7},
        {"chunk_key_encoding": "absent"},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": ":"}}},
        {"codecs": "absent"},
        {"codecs": []},
        {"codecs": {"name": "bytes"}},
        {"codecs": [7]},
        {"codecs": [{"name": "bytes"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [0, 0]}}, PLAIN]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [0]}}, PLAIN]},
        {"codecs": [{"name": "transpose"}, PLAIN]},
        {"codecs": sharded(chunk_shape=[3, 3])},
        {"codecs": sharded(chunk_shape=[2])},
        {"codecs": sharded(chunk_shape=[0, 3])},
        {"codecs": sharded(chunk_shape="absent")},
        {"codecs": sharded(codecs="absent")},
        {"codecs": sharded(index_codecs="absent")},
        {"codecs": sharded(index_location="middle")},
    ],
    ids=str,
)
def test_malformed_metadata_is_corrupt_and_named(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptError) as caught:
        parsed(**changes)
    assert caught.value.file == "w/zarr.json"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"zarr_format": 2}, "is 2, not 3"),
        ({"data_type": "uint4"}, "uint4"),
        ({"data_type": "string"}, "string"),
        ({"data_type": {"name": "numpy.datetime64", "configuration": {}}}, "numpy.datetime64"),
        ({"data_type": 7}, "7"),
        ({"chunk_grid": {"name": "rectilinear", "configuration": {}}}, "rectilinear"),
        ({"chunk_key_encoding": {"name": "fancy"}}, "fancy"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
        ({"must": {"must_understand": True}}, "'must'"),
        ({"codecs": [{"name": "vlen-utf8"}]}, "vlen-utf8"),
        ({"codecs": [PLAIN, *sharded()]}, "before or after the sharding codec"),
        ({"codecs": [*sharded(), {"name": "zstd"}]}, "before or after the sharding codec"),
        ({"codecs": sharded(codecs=sharded())}, "within shards"),
        ({"codecs": sharded(index_codecs=[PLAIN, {"name": "zstd"}])}, "zstd"),
        (
            {
                "codecs": sharded(
                    index_codecs=[{"name": "bytes", "configuration": {"endian": "big"}}]
                )
            },
            "index",
        ),
    ],
)
def test_what_is_not_handled_is_refused_by_name(changes: dict[str, object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        parsed(**changes)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_metadata_that_is_no_json_object_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        zarr3.FORMAT.read(MemoryStore({"zarr.json": data}))
    assert caught.value.file == "zarr.json"


def test_a_codec_that_is_not_known_is_named_when_data_is_asked_for() -> None:
    metadata = {**GOOD, "codecs": [PLAIN, {"name": "numcodecs.lzma"}]}
    store = MemoryStore(
        {"w/zarr.json": json.dumps(metadata).encode(), "w/c/0/0": b"x", "w/c/0/1": b"x"}
    )
    catalog = zarr3.FORMAT.read(store)
    with pytest.raises(UnsupportedError, match=r"numcodecs\.lzma") as caught:
        catalog.fragments("w")
    assert caught.value.key == "w"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A group with ``w`` in four chunks and the shards ``s``, all plain."""
    tensors: dict[str, tuple[str, Shape]] = {"w": ("float32", (4, 6)), "s": ("float32", (8, 10))}
    source, store = source_of(tensors, chunks={"w": (2, 3), "s": (4, 10)})
    return written(source, store, zarr3.FORMAT, tmp_path / "group", shard_bytes=100)


def test_a_missing_chunk_is_reported_not_filled(folder: Path) -> None:
    (folder / "w" / "c" / "1" / "0").unlink()
    with pytest.raises(MissingShardError, match="3 of 4") as caught:
        read(folder)
    assert (caught.value.file, caught.value.key) == ("w/c/1/0", "w")


@pytest.mark.parametrize(("change", "error"), [(-1, TruncatedError), (1, CorruptError)])
def test_a_chunk_of_the_wrong_length_is_named(
    folder: Path, change: int, error: type[CorruptError]
) -> None:
    path = folder / "w" / "c" / "1" / "0"
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with pytest.raises(error) as caught:
        read(folder)
    assert caught.value.file == "w/c/1/0"


@pytest.mark.parametrize("name", ["c/9/9", "c/0/2", "c/0/00", "0.0", "c.0.0"])
def test_a_chunk_beyond_the_grid_is_named(folder: Path, name: str) -> None:
    (folder / "w" / name).parent.mkdir(exist_ok=True)
    (folder / "w" / name).write_bytes(b"x")
    with pytest.raises(CorruptError, match="outside the array's grid") as caught:
        read(folder)
    assert caught.value.file == f"w/{name}"


def test_a_missing_zarr_json_is_named(folder: Path) -> None:
    (folder / "w" / "zarr.json").unlink()
    with pytest.raises(MissingShardError, match="for the chunk") as caught:
        read(folder)
    assert (caught.value.file, caught.value.key) == ("w/zarr.json", "w")


def test_a_group_without_its_zarr_json_is_still_read(folder: Path) -> None:
    (folder / "zarr.json").unlink()
    assert zarr3.FORMAT.sniff(LocalStore(folder))
    assert set(read(folder)[0].tensors) == {"w", "s"}


def test_a_shard_with_a_bad_checksum_is_named(folder: Path) -> None:
    path = folder / "s" / "c" / "1" / "0"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    catalog, _ = read(folder)
    with pytest.raises(CorruptError, match="CRC-32C") as caught:
        catalog.fragments("s")
    assert (caught.value.file, caught.value.key) == ("s/c/1/0", "s")


def test_a_shard_shorter_than_its_index_is_named(folder: Path) -> None:
    path = folder / "s" / "c" / "1" / "0"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(TruncatedError, match="index alone") as caught:
        read(folder)
    assert caught.value.file == "s/c/1/0"


def test_a_shard_of_ours_without_a_chunk_is_reported_not_filled(folder: Path) -> None:
    path = folder / "s" / "c" / "1" / "0"
    data = path.read_bytes()
    body, index = data[: 4 * 40], bytearray(data[4 * 40 : -4])
    index[16:32] = b"\xff" * 16
    path.write_bytes(body + index + crc32c(bytes(index)).to_bytes(4, "little"))
    catalog, _ = read(folder)
    with pytest.raises(MissingShardError, match=r"inner chunk \(0, 1\)") as caught:
        catalog.fragments("s")
    assert (caught.value.file, caught.value.key) == ("s/c/1/0", "s")


def test_an_array_of_strings_is_shown_and_can_be_left_out(tmp_path: Path) -> None:
    group = zarr_python.open_group(tmp_path / "in", mode="w", zarr_format=3)
    group.create_array("w", data=np.arange(6, dtype="float32"), compressors=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group.create_array("names", data=np.array(["a", "b"], dtype="<U1"))
    catalog = zarr3.FORMAT.read(LocalStore(tmp_path / "in"))
    assert list(catalog.tensors) == ["w"]
    assert "not read" in str(catalog.objects["names"].value)
    with pytest.raises(UnsupportedError, match="cannot copy") as refusal:
        run(Job(src=tmp_path / "in", dst=tmp_path / "out", to="dcp", fsync=False))
    assert (refusal.value.key, "--exclude" in str(refusal.value.hint)) == ("names", True)
    assert (
        run(
            Job(
                src=tmp_path / "in", dst=tmp_path / "out", to="dcp", exclude=("names",), fsync=False
            )
        ).n_tensors
        == 1
    )


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "bfloat16", "float8_e8m0fnu"])
def test_a_note_says_of_which_types_zarr_python_opens_nothing(dtype: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4, 3).to(getattr(torch, dtype))}, tmp_path / "in.pt")
    report = run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out", to="zarr3", fsync=False))
    code = (
        "import sys, zarr; print(zarr.open_group(sys.argv[1], "
        "mode='r')['w'][...].astype('f4').sum())"
    )
    taught = f"import core.dist_checkpointing.strategies.zarr_types; {code}"
    opened, opened_after = (forked.run(["-c", text, tmp_path / "out"]) for text in (code, taught))
    notes = [note for note in report.notes if "zarr-python" in note]
    assert len(notes) == (opened.returncode != 0) == (dtype != "float32")
    assert opened_after.stdout.strip() == "12.0"
    assert all(dtype in note and "zarr_types" in note for note in notes)


def test_tensors_of_a_type_that_zarr_lacks_and_nothing_casts_are_skipped_together(
    tmp_path: Path,
) -> None:
    odd = {f"layers.{n}.w": torch.zeros(2, dtype=torch.uint8).view(torch.bits8) for n in range(3)}
    torch.save({**odd, "other": torch.zeros(2)}, tmp_path / "in.pt")
    job = Job(src=tmp_path / "in.pt", dst=tmp_path / "out", to="zarr3", fsync=False)
    with pytest.raises(UnsupportedError, match="or the dtypes of 2 other tensors") as raised:
        run(job)
    assert raised.value.hint == "skip with --exclude 'layers.[0-2].w'"
    run(replace(job, exclude=("layers.[0-2].w",)))
