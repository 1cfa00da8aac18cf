"""OCDBT databases of zarr arrays, written by tensorstore as Orbax does it, and Orbax's own
checkpoints.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
from safetensors import safe_open

from core.arrays.checksum import crc32c
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.ocdbt import format as ocdbt
from core.formats.ocdbt.entries import list_entries
from core.formats.ocdbt.nodes import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    UnfoldBudget,
    ValueLocation,
    parse_newest_version,
    parse_node,
)
from core.pickle.nesting import entries
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.fragments import replace_fragments
from tests.support.materialize import tensor_bytes

CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
"""As Orbax sets it."""

Values = dict[str, np.ndarray[Any, Any]]


def counted(*shape: int, dtype: Any = np.float32, start: int = 0) -> np.ndarray[Any, Any]:
    """An array whose bytes count up, so that no two regions are equal."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = (np.arange(start, start + n_bytes, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8)
    return data.view(dtype).reshape(shape) if n_bytes else np.zeros(shape, dtype)


VALUES: Values = {
    "params.dense.kernel": counted(50, 33, dtype=ml_dtypes.bfloat16),
    "params.dense.bias": counted(33),
    "params.scale": counted(start=5),
    "params.stack": counted(5, 20, 31, dtype=np.float64),
    "count": counted(1, dtype=np.int64),
    "empty": counted(0, 4),
    "ids": counted(700, dtype=np.int8),
    "eight": counted(40, 40, dtype=ml_dtypes.float8_e4m3fn),
}
CHUNKS = {"params.dense.kernel": (20, 33), "params.stack": (2, 20, 16), "ids": (600,)}


def kvstore(folder: Path, **config: object) -> dict[str, object]:
    return {"driver": "ocdbt", "base": f"file://{folder}/", "config": {**CONFIG, **config}}


def save(
    folder: Path, values: Values, spec_of: Callable[..., dict[str, object]], **config: object
) -> Path:
    """Every array in a commit of its own, as a process of Orbax would."""
    for key, value in values.items():
        dtype = value.dtype.name
        driver, metadata = spec_of(
            value.shape, CHUNKS.get(key, tuple(max(n, 1) for n in value.shape)), dtype
        )
        spec = {
            "driver": driver,
            "kvstore": {**kvstore(folder, **config), "path": f"{key}/"},
            "metadata": metadata,
            "create": True,
            "store_data_equal_to_fill_value": True,
        }
        array = ts.open(spec, dtype=ts.dtype(dtype)).result()
        if value.size:
            array.write(value).result()
    return folder


def zarr2(
    compressor: object = None, order: str = "C"
) -> Callable[..., tuple[str, dict[str, object]]]:
    def spec(
        shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str
    ) -> tuple[str, dict[str, object]]:
        turned = order if len(shape) > 1 else "C"
        return "zarr", {"shape": shape, "chunks": chunks, "compressor": compressor, "order": turned}

    return spec


def zarr3(*codecs: object) -> Callable[..., tuple[str, dict[str, object]]]:
    def spec(
        shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str
    ) -> tuple[str, dict[str, object]]:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        return "zarr3", {"shape": shape, "chunk_grid": grid, "codecs": list(codecs)}

    return spec


def sharded(*inner: object) -> Callable[..., tuple[str, dict[str, object]]]:
    def spec(
        shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str
    ) -> tuple[str, dict[str, object]]:
        part = tuple(n // 2 if n % 2 == 0 else n for n in chunks)
        codec = {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": part, "codecs": list(inner)},
        }
        return zarr3(codec)(shape, chunks, dtype)

    return spec


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3}}
FORMS = {
    "zarr2": zarr2(),
    "zarr2_fortran": zarr2(order="F"),
    "zarr2_zstd": zarr2({"id": "zstd", "level": 1}),
    "zarr2_blosc": zarr2({"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}),
    "zarr3": zarr3(LITTLE),
    "zarr3_zstd": zarr3(LITTLE, ZSTD),
    "zarr3_sharded": sharded(LITTLE),
    "zarr3_sharded_zstd": sharded(LITTLE, ZSTD),
}


def opened(folder: Path) -> tuple[Catalog, DecodedStore]:
    """The catalog, and a store through which its encoded arrays are read as the engine does it."""
    plain = LocalStore(folder)
    catalog = ocdbt.FORMAT.read(plain)
    store = DecodedStore(plain)

    def fragments_of(key: str) -> list[Any]:
        return [
            replace(piece, array=piece.array and store.placed(piece.array))
            for piece in catalog.fragments(key)
        ]

    return replace_fragments(catalog, fragments_of), store


def assert_holds(folder: Path, values: Values) -> None:
    catalog, store = opened(folder)
    assert set(catalog.tensors) == set(values)
    for key, value in values.items():
        tensor = catalog.tensors[key]
        assert (tensor.dtype, tensor.shape) == (value.dtype.name, value.shape)
        assert tensor_bytes(catalog, store, key).tobytes() == value.tobytes(), key  # type: ignore[arg-type]


# ---- reading


@pytest.mark.parametrize("form", FORMS)
def test_arrays_are_read_bit_for_bit(tmp_path: Path, form: str) -> None:
    folder = save(tmp_path / "db", VALUES, FORMS[form])
    assert ocdbt.FORMAT.sniff(LocalStore(folder))
    assert_holds(folder, VALUES)


def test_raw_chunks_are_bytes_of_the_data_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "db", VALUES, zarr2())
    catalog = ocdbt.FORMAT.read(LocalStore(folder))
    for key in ("params.dense.kernel", "params.stack", "eight"):
        for fragment in catalog.fragments(key):
            assert fragment.array is not None
            extent = fragment.array.extent
            assert extent.encoding is None
            assert extent.file.startswith("d/")
    (small,) = catalog.fragments("params.dense.bias")
    assert small.array is not None
    assert small.array.extent.encoding is not None
    assert small.array.extent.encoding.name == "inline value"


def test_shards_of_raw_chunks_are_bytes_of_the_data_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "db", VALUES, sharded(LITTLE))
    catalog = ocdbt.FORMAT.read(LocalStore(folder))
    fragments = list(catalog.fragments("params.stack"))
    assert fragments
    for fragment in fragments:
        assert fragment.array is not None
        assert fragment.array.extent.encoding is None


@pytest.mark.parametrize("compression", [{"id": "zstd"}, None])
def test_a_tree_of_several_levels_is_walked(tmp_path: Path, compression: object) -> None:
    folder = tmp_path / "db"
    spec = kvstore(
        folder, max_decoded_node_bytes=600, compression=compression, max_inline_value_bytes=20
    )
    database = ts.KvStore.open(spec).result()
    expected = {f"key{n * 7919 % 1000:03}.{n % 3}/{n}": b"%d" % n * (n % 13) for n in range(1000)}
    with ts.Transaction() as transaction:
        for key, value in expected.items():
            database.with_transaction(transaction).write(key, value).result()
    store = LocalStore(folder)
    data = store.read("manifest.ocdbt", 0, store.size("manifest.ocdbt"))
    assert parse_newest_version(data, UnfoldBudget()).height >= 2
    assert contents(folder) == expected


def contents(folder: Path) -> dict[str, bytes]:
    """Every key and value, read through our own tree walk."""
    store = LocalStore(folder)
    return {
        key: store.read(value.path, value.offset, value.n_bytes)
        if isinstance(value, ValueLocation)
        else value
        for key, value in list_entries(store).items()
    }


def test_the_newest_of_many_versions_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    database = ts.KvStore.open(kvstore(folder)).result()
    for number in range(40):  # more than one node of the version tree holds
        database.write(f"k{number % 7}", b"%d" % number).result()
    database.delete_range(ts.KvStore.KeyRange("k3", "k4")).result()
    assert contents(folder) == {f"k{n % 7}": b"%d" % n for n in range(33, 40) if n % 7 != 3}
    database.delete_range(ts.KvStore.KeyRange()).result()
    assert contents(folder) == {}


def test_merged_databases_of_several_processes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    halves = [dict(list(VALUES.items())[:4]), dict(list(VALUES.items())[4:])]
    for number, half in enumerate(halves):
        save(folder / f"ocdbt.process_{number}", half, zarr2())
    context = ts.Context()  # tensorstore copies entries only between databases of one context
    merged = ts.KvStore.open(kvstore(folder), context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for number in range(2):
            part = ts.KvStore.open(
                kvstore(folder / f"ocdbt.process_{number}"), context=context
            ).result()
            part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    assert_holds(folder, VALUES)
    catalog = ocdbt.FORMAT.read(LocalStore(folder))
    array = catalog.fragments("params.stack")[0].array
    assert array is not None
    assert array.extent.file.startswith("ocdbt.process_0/d/")


def test_data_files_may_lie_in_other_directories(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    prefixes = {"value_data_prefix": "ocdbt_data/d/", "btree_node_data_prefix": "ocdbt_meta/d/"}
    array = counted(40, 40)
    spec = {
        "driver": "zarr",
        "kvstore": {**kvstore(folder), **prefixes, "path": "w/"},
        "create": True,
    }
    ts.open(spec, dtype=ts.float32, shape=array.shape).result().write(array).result()
    assert (folder / "ocdbt_data").is_dir()
    assert_holds(folder, {"w": array})


def test_reading_imports_nothing_heavy_but_zstandard(tmp_path: Path, repo_dir: Path) -> None:
    folder = save(tmp_path / "db", VALUES, zarr2({"id": "zstd"}))
    code = (
        "import sys, pathlib\n"
        "from core.files.store import LocalStore\n"
        "from core.formats.ocdbt import format as ocdbt\n"
        "catalog = ocdbt.FORMAT.read(LocalStore(pathlib.Path(sys.argv[1])))\n"
        "assert len(catalog.tensors) == 8\n"
        "assert not {'torch', 'numpy', 'tensorstore', 'zarr'} & set(sys.modules), "
        "sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True, cwd=repo_dir)


@pytest.mark.parametrize("form", ["zarr2", "zarr2_zstd", "zarr3_sharded_zstd"])
def test_a_conversion_to_torch_keeps_every_byte(tmp_path: Path, form: str) -> None:
    folder = save(tmp_path / "db", VALUES, FORMS[form])
    run(Job(src=folder, dst=tmp_path / "out.pt", to="torch", fsync=False))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(loaded) == set(VALUES)
    for key, value in VALUES.items():
        assert tuple(loaded[key].shape) == value.shape
        assert str(loaded[key].dtype) == f"torch.{value.dtype.name}"
        flat = loaded[key].reshape(-1)
        assert (
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        ) == value.tobytes(), key


# ---- Orbax's files


def steps(*names: object) -> list[dict[str, object]]:
    return [{"key": str(name), "key_type": 1 if isinstance(name, int) else 2} for name in names]


def leaf(*names: object, kind: str = "jax.Array") -> tuple[str, dict[str, object]]:
    value = {"value_type": kind, "skip_deserialize": kind in ("None", "Dict")}
    return str(tuple(map(str, names))), {"key_metadata": steps(*names), "value_metadata": value}


def orbax(
    folder: Path, *leaves: tuple[str, dict[str, object]], spec_of: Any = FORMS["zarr2"]
) -> Path:
    """A checkpoint of these leaves; arrays are counted."""
    values = {}
    for _, row in leaves:
        if row["value_metadata"]["value_type"] == "jax.Array":  # type: ignore[index]
            name = ".".join(step["key"] for step in row["key_metadata"])  # type: ignore[attr-defined]
            values[name] = counted(4, 4, start=len(name))
    save(folder, values, spec_of)
    (folder / "_METADATA").write_text(
        json.dumps({"tree_metadata": dict(leaves), "use_ocdbt": True})
    )
    return folder


LEAVES = (
    leaf("params", "dense.kernel"),
    leaf("params", "bias"),
    leaf("opt", 0, "mu"),
    leaf("opt", 1, kind="None"),
    leaf("opt", 2, kind="Dict"),
    leaf("name", kind="string"),
)


def test_the_nesting_comes_from_the_metadata(tmp_path: Path) -> None:
    folder = orbax(tmp_path / "x", *LEAVES)
    (folder / "_strings.json").write_text('{"name": "trial"}')
    catalog = ocdbt.FORMAT.read(LocalStore(folder))
    assert [(entry.path, entry.key) for entry in entries(catalog.skeleton)] == [
        (("params", "dense.kernel"), "params.dense.kernel"),
        (("params", "bias"), "params.bias"),
        (("opt", 0, "mu"), "opt.0.mu"),
        (("opt", 1), "opt.1"),
        (("opt", 2), "opt.2"),
        (("name",), "name"),
    ]
    assert {key: item.value for key, item in catalog.objects.items()} == {
        "opt.1": None,
        "opt.2": {},
        "name": "trial",
    }


def test_an_array_that_the_metadata_lists_must_be_there(tmp_path: Path) -> None:
    folder = orbax(tmp_path / "x", *LEAVES[:3])
    (folder / "_METADATA").write_text(
        json.dumps({"tree_metadata": dict((*LEAVES[:3], leaf("params", "gone")))})
    )
    with pytest.raises(MissingShardError) as caught:
        ocdbt.FORMAT.read(LocalStore(folder))
    assert (caught.value.file, caught.value.key) == ("_METADATA", "params.gone")


def test_a_text_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match="the string is missing") as caught:
        ocdbt.FORMAT.read(LocalStore(orbax(tmp_path / "x", *LEAVES)))
    assert caught.value.key == "name"


def one_leaf(step: object, kind: object = "None") -> str:
    row = {"key_metadata": [step], "value_metadata": {"value_type": kind}}
    return json.dumps({"tree_metadata": {"x": row}})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"tree_metadata": []}',
        '{"tree_metadata": {"x": {}}}',
        (
            '{"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {"value_type": '
            '"jax.Array"}}}}'
        ),
        one_leaf({"key": "a", "key_type": 1}),
        one_leaf({"key": "a", "key_type": 9}),
        one_leaf({"key": 3, "key_type": 2}),
        one_leaf({"key": "a"}),
        one_leaf({"key": "a", "key_type": 2}, kind=7),
        json.dumps(
            {"tree_metadata": dict((leaf("a.b", kind="None"), leaf("a", "b", kind="None")))}
        ),
        "[" * 100_000,
    ],
)
def test_malformed_metadata_is_corrupt(tmp_path: Path, text: str) -> None:
    folder = orbax(tmp_path / "x", leaf("w"))
    (folder / "_METADATA").write_text(text)
    with pytest.raises(CorruptError) as caught:
        ocdbt.FORMAT.read(LocalStore(folder))
    assert caught.value.file == "_METADATA"


def test_an_entry_below_an_array_is_corrupt(tmp_path: Path) -> None:
    folder = orbax(tmp_path / "x", leaf("a"), leaf("a", "b"))
    with pytest.raises(CorruptError):
        ocdbt.FORMAT.read(LocalStore(folder))


def test_a_database_without_metadata_is_flat(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"a.b": counted(3)}, zarr2())
    (folder / "checkpoint").write_bytes(b"\x80")
    catalog = ocdbt.FORMAT.read(LocalStore(folder))
    assert catalog.skeleton is None
    assert "msgpack" in str(catalog.notes)


def test_the_iteration_is_that_of_the_step(tmp_path: Path) -> None:
    for number, form in enumerate(("zarr2", "zarr2_zstd", "zarr3_sharded_zstd")):
        folder = save(
            tmp_path / form, {"step": np.array(70 + number, np.int32), "w": counted(3)}, FORMS[form]
        )
        assert ocdbt.FORMAT.read(LocalStore(folder)).iteration == 70 + number


def test_one_item_of_a_checkpoint_manager_is_the_checkpoint(tmp_path: Path) -> None:
    orbax(tmp_path / "state", leaf("params", "w"))
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "metadata").write_text("{}")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    assert ocdbt.FORMAT.sniff(LocalStore(tmp_path))
    catalog, store = opened(tmp_path)
    assert list(catalog.tensors) == ["params.w"]
    assert tensor_bytes(catalog, store, "params.w").tobytes() == counted(4, 4, start=8).tobytes()  # type: ignore[arg-type]
    assert catalog.notes == (
        "these items were not read, because they are not trees of arrays: meta",
    )


def test_several_items_are_entries_of_the_root(tmp_path: Path) -> None:
    for item in ("params", "opt"):
        orbax(tmp_path / item, leaf("w"), leaf("deep", 0))
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    catalog, store = opened(tmp_path)
    assert sorted(catalog.tensors) == ["opt.deep.0", "opt.w", "params.deep.0", "params.w"]
    assert {entry.path for entry in entries(catalog.skeleton)} >= {
        ("opt", "deep", 0),
        ("params", "w"),
    }
    assert tensor_bytes(catalog, store, "opt.deep.0").tobytes() == counted(4, 4, start=6).tobytes()  # type: ignore[arg-type]


def test_arrays_in_directories_of_their_own_are_read(tmp_path: Path) -> None:
    for form in ("zarr2", "zarr2_zstd", "zarr3_sharded_zstd"):
        folder = tmp_path / form
        for key, value in VALUES.items():
            chunks = CHUNKS.get(key, tuple(max(n, 1) for n in value.shape))
            driver, metadata = FORMS[form](value.shape, chunks, value.dtype.name)
            place = {"driver": "file", "path": f"{folder}/{key}/"}
            spec = {"driver": driver, "kvstore": place, "metadata": metadata, "create": True}
            array = ts.open(
                {**spec, "store_data_equal_to_fill_value": True}, dtype=ts.dtype(value.dtype.name)
            ).result()
            if value.size:
                array.write(value).result()
        tree = dict(leaf(*key.split(".")) for key in VALUES)
        (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": False}))
        assert ocdbt.FORMAT.sniff(LocalStore(folder))
        assert_holds(folder, VALUES)


def test_a_save_that_was_not_merged_is_called_so(tmp_path: Path) -> None:
    folder = orbax(tmp_path / "x", leaf("w"))
    (folder / "ocdbt.process_0").mkdir()
    (folder / "manifest.ocdbt").rename(folder / "ocdbt.process_0" / "manifest.ocdbt")
    for _ in range(2):  # with _METADATA, and without
        assert ocdbt.FORMAT.sniff(LocalStore(folder))
        with pytest.raises(MissingShardError, match="did not finish"):
            ocdbt.FORMAT.read(LocalStore(folder))
        (folder / "_METADATA").unlink(missing_ok=True)


def test_a_checkpoint_without_arrays_is_refused_with_its_items(tmp_path: Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "meta").mkdir()
    with pytest.raises(UnsupportedError, match="its items are meta"):
        ocdbt.FORMAT.read(LocalStore(tmp_path))


def test_other_checkpoints_are_not_taken_for_orbax(golden: Path) -> None:
    for name in (
        "torch_dcp/fsdp2_dp2",
        "mcore0121_zarr/dense_gqa/tp2_pp2",
        "hf/llama/safetensors_single",
        "deepspeed",
    ):
        assert not ocdbt.FORMAT.sniff(LocalStore(golden / name)), name


# ---- broken files


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return save(tmp_path / "db", VALUES, zarr2())


def test_a_chunk_that_the_database_does_not_hold_is_the_fill_value_or_refused(
    database: Path, tmp_path: Path
) -> None:
    ts.KvStore.open(kvstore(database)).result().write("params.stack/1.0.1", None).result()
    with pytest.raises(MissingShardError, match="1 chunk is missing") as caught:
        run(Job(src=database, dst=tmp_path / "refused", to="safetensors", missing_chunks="error"))
    assert caught.value.key == "params.stack"
    assert caught.value.file == "manifest.ocdbt#params.stack/1.0.1"
    findings = {finding.code: finding for finding in validate(database, level=Level.DEEP).findings}
    assert (findings["CK148"].key, findings["CK148"].severity) == ("params.stack", Severity.NOTE)
    report = run(Job(src=database, dst=tmp_path / "out.safetensors", to="safetensors", verify=True))
    assert any("1 chunk of params.stack is not stored" in note for note in report.notes)
    stored = ts.open(
        {"driver": "zarr", "kvstore": {**kvstore(database), "path": "params.stack/"}}
    ).result()
    wanted = np.asarray(stored.read().result())
    with safe_open(tmp_path / "out.safetensors", framework="np") as file:
        assert file.get_tensor("params.stack").tobytes() == wanted.tobytes()


def test_a_chunk_of_the_wrong_length_is_an_error(database: Path) -> None:
    opened_database = ts.KvStore.open(kvstore(database)).result()
    opened_database.write("params.stack/1.0.1", bytes(5119)).result()
    with pytest.raises(TruncatedError, match="5119 bytes long, but .* needs 5120"):
        ocdbt.FORMAT.read(LocalStore(database))


def test_metadata_that_does_not_fit_the_chunks_is_an_error(database: Path) -> None:
    opened_database = ts.KvStore.open(kvstore(database)).result()
    metadata = json.loads(opened_database.read("ids/.zarray").result().value)
    for change in ({"shape": [500]}, {"shape": [1 << 60]}, {"chunks": [100]}, {"shape": "x"}):
        opened_database.write("ids/.zarray", json.dumps({**metadata, **change}).encode()).result()
        with pytest.raises(CorruptError) as caught:
            ocdbt.FORMAT.read(LocalStore(database))
        assert caught.value.key == "ids" or caught.value.file == "manifest.ocdbt#ids/.zarray"


def test_missing_and_cut_data_files_are_named(database: Path) -> None:
    array = ocdbt.FORMAT.read(LocalStore(database)).fragments("params.stack")[0].array
    assert array is not None
    name = array.extent.file
    data = (database / name).read_bytes()
    (database / name).write_bytes(data[:-1000])
    with pytest.raises(CheckpointingException) as caught:
        ocdbt.FORMAT.read(LocalStore(database))
    assert caught.value.file == name
    (database / name).unlink()
    with pytest.raises(MissingShardError) as caught:
        ocdbt.FORMAT.read(LocalStore(database))
    assert caught.value.file == name


@pytest.mark.parametrize("at", [0, 5, 12, 13, 20, -1, -4])
def test_one_changed_byte_of_the_manifest_is_an_error(database: Path, at: int) -> None:
    path = database / "manifest.ocdbt"
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        ocdbt.FORMAT.read(LocalStore(database))
    assert caught.value.file == "manifest.ocdbt"


@pytest.mark.parametrize("n_bytes", [0, 1, 12, 17, 18, 60])
def test_a_cut_manifest_is_truncated(database: Path, n_bytes: int) -> None:
    path = database / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(TruncatedError) as caught:
        ocdbt.FORMAT.read(LocalStore(database))
    assert caught.value.file == "manifest.ocdbt"


def test_one_changed_byte_of_a_node_is_an_error_that_names_its_file(database: Path) -> None:
    manifest = (database / "manifest.ocdbt").read_bytes()
    root = parse_newest_version(manifest, UnfoldBudget()).root
    assert root is not None
    path = database / root.path
    data = bytearray(path.read_bytes())
    data[root.offset + root.n_bytes // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32C") as caught:
        ocdbt.FORMAT.read(LocalStore(database))
    assert caught.value.file == root.path
    assert caught.value.span == (root.offset, root.offset + root.n_bytes)


def test_numbered_manifests_are_refused_by_name(tmp_path: Path) -> None:
    database = ts.KvStore.open(kvstore(tmp_path, manifest_kind="numbered")).result()
    database.write("a", b"b").result()
    with pytest.raises(UnsupportedError, match="numbered"):
        ocdbt.FORMAT.read(LocalStore(tmp_path))


# ---- hostile files: manifests and nodes made by hand


def varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*digits, number))


def varints(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def wrapped(magic: int, body: bytes) -> bytes:
    """A manifest or node with an uncompressed body."""
    data = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + b"\0\0" + body
    return data + crc32c(data).to_bytes(4, "little")


def table(*paths: str) -> bytes:
    """A table of data files that share no prefix."""
    n = len(paths)
    return varints(n, *[0] * (n - 1), *map(len, paths), *[0] * n) + "".join(paths).encode()


def manifest(path: str, offset: int, n_bytes: int, *, height: int = 0, n_keys: int = 1) -> bytes:
    body = bytes(16) + varints(0, 1024, 1 << 20) + b"\x04" + varint(0) + table(path)
    body += (
        varints(1, 1)
        + bytes([height])
        + varints(0, offset, n_bytes, n_keys, 0, 0)
        + bytes(8)
        + varint(0)
    )
    return wrapped(MANIFEST_MAGIC, body)


def leaf_node(keys: list[bytes], values: list[bytes]) -> bytes:
    n = len(keys)
    body = b"\0" + table() + varints(n, *[0] * (n - 1), *map(len, keys)) + b"".join(keys)
    return wrapped(NODE_MAGIC, body + varints(*map(len, values), *[0] * n) + b"".join(values))


def interior(height: int, keys: list[bytes], path: str, children: list[tuple[int, int]]) -> bytes:
    n = len(keys)
    body = (
        bytes([height])
        + table(path)
        + varints(n, *[0] * (n - 1), *map(len, keys), *map(len, keys))
        + b"".join(keys)
    )
    body += varints(
        *[0] * n, *(offset for offset, _ in children), *(size for _, size in children), *[0] * 3 * n
    )
    return wrapped(NODE_MAGIC, body)


def hand_made(node: bytes, **options: int) -> MemoryStore:
    return MemoryStore({"manifest.ocdbt": manifest("d/x", 0, len(node), **options), "d/x": node})


def test_what_is_made_by_hand_is_read() -> None:
    assert list_entries(hand_made(leaf_node([b"a", b"b"], [b"1", b""]), n_keys=2)) == {
        "a": b"1",
        "b": b"",
    }


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "d/../../x", "d//x", "d/\0"])
def test_data_files_outside_the_checkpoint_are_refused(path: str) -> None:
    store = MemoryStore({"manifest.ocdbt": manifest(path, 0, 30)})
    with pytest.raises(UnsafeError):
        list_entries(store)


@pytest.mark.parametrize(
    ("store", "match"),
    [
        (hand_made(leaf_node([b"b", b"a"], [b"", b""]), n_keys=2), "not in order"),
        (hand_made(leaf_node([b"a", b"a"], [b"", b""]), n_keys=2), "not in order"),
        (hand_made(leaf_node([b"a"], [b""]), n_keys=2), "1 keys, but the manifest lists 2"),
        (hand_made(leaf_node([b"\xff"], [b""])), "not valid UTF-8"),
        (hand_made(leaf_node([b"a"], [b""]), height=1), "height 0, but its parent requires 1"),
        (hand_made(leaf_node([b"a"], [b""]), height=200), "200 levels"),
        (hand_made(wrapped(NODE_MAGIC, b"\0" + table() + varint(0))), "no entries"),
        (hand_made(wrapped(NODE_MAGIC, b"\0" + table() + varint(1 << 40))), "items should follow"),
        (hand_made(wrapped(NODE_MAGIC, b"\0" + b"\xff" * 11)), "more than 64 bits"),
        (
            hand_made(wrapped(NODE_MAGIC, b"\0" + table() + varints(1, 1 << 20) + b"a")),
            "a name is",
        ),
        (
            hand_made(wrapped(NODE_MAGIC, b"\0" + table() + varints(2, 5, 1, 1) + b"ab")),
            "shares 5 bytes",
        ),
        (
            hand_made(wrapped(NODE_MAGIC, b"\0" + table() + varints(1, 1) + b"a" + varints(0, 7))),
            "kind 7",
        ),
        (
            hand_made(
                wrapped(NODE_MAGIC, b"\0" + table() + varints(1, 1) + b"a" + varints(5, 1, 3, 0))
            ),
            "refers to data file 3, but",
        ),
        (hand_made(leaf_node([b"a"], [b""])[:-4] + b"\0\0\0\0"), "CRC-32C"),
        (hand_made(wrapped(MANIFEST_MAGIC, b"")), "the magic number is"),
    ],
)
def test_nodes_that_cannot_be_are_corrupt(store: MemoryStore, match: str) -> None:
    with pytest.raises(CorruptError, match=match) as caught:
        list_entries(store)
    assert caught.value.file in ("d/x", "manifest.ocdbt")


def test_values_behind_the_end_of_a_file_are_truncated() -> None:
    node = wrapped(
        NODE_MAGIC, b"\0" + table("d/x") + varints(1, 1) + b"a" + varints(5, 1, 0, 1 << 50)
    )
    with pytest.raises(TruncatedError, match="up to byte") as caught:
        list_entries(hand_made(node))
    assert caught.value.file == "d/x"
    with pytest.raises(TruncatedError, match="up to byte"):
        list_entries(MemoryStore({"manifest.ocdbt": manifest("d/x", 1 << 60, 30), "d/x": b""}))


def test_shared_nodes_that_unfold_for_ever_are_refused() -> None:
    """A hundred paths a level, all to one node: 10⁴⁰ keys in 30 KB."""
    data = bytearray(leaf_node([b"%02d" % n for n in range(100)], [b""] * 100))
    place = (0, len(data))
    for height in range(1, 20):
        node = interior(height, [b"%02d" % n for n in range(100)], "d/x", [place] * 100)
        place = (len(data), len(node))
        data += node
    store = MemoryStore({"manifest.ocdbt": manifest("d/x", *place, height=19), "d/x": data})
    with pytest.raises((UnsafeError, CorruptError)):
        list_entries(store)


def test_keys_that_unfold_from_their_prefixes_are_refused() -> None:
    n = 60_000
    keys = varints(n, *[60_000] * (n - 1), 60_000, *[1] * (n - 1))
    body = b"\0" + table() + keys + b"a" * 60_000 + b"b" * (n - 1)
    with pytest.raises(UnsafeError, match="far more"):
        parse_node(wrapped(NODE_MAGIC, body), ValueLocation("", "d/x", 0, 0), 0, UnfoldBudget())


def test_a_node_that_inflates_without_end_is_refused(tmp_path: Path) -> None:
    import zstandard

    bomb = zstandard.compress(bytes(1 << 30), 1)
    head = NODE_MAGIC.to_bytes(4, "big") + (len(bomb) + 18).to_bytes(8, "little") + b"\0\1"
    data = head + bomb
    with pytest.raises(UnsafeError):
        parse_node(
            data + crc32c(data).to_bytes(4, "little"),
            ValueLocation("", "d/x", 0, 0),
            0,
            UnfoldBudget(),
        )


def bodies(folder: Path) -> Iterator[tuple[int, bytes]]:
    """The bodies of a real manifest and of its root node."""
    from core.formats.ocdbt.nodes import unwrap

    data = (folder / "manifest.ocdbt").read_bytes()
    yield MANIFEST_MAGIC, unwrap(data, MANIFEST_MAGIC, UnfoldBudget())
    root = parse_newest_version(data, UnfoldBudget()).root
    assert root is not None
    node = (folder / root.path).read_bytes()[root.offset : root.offset + root.n_bytes]
    yield NODE_MAGIC, unwrap(node, NODE_MAGIC, UnfoldBudget())


def test_scrambled_bodies_give_entries_or_the_projects_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "db", VALUES, zarr2(), max_decoded_node_bytes=700)
    chance = random.Random(7)
    (_, manifest_body), (_, node_body) = bodies(folder)
    store = LocalStore(folder)
    real = {
        name: store.read(name, 0, store.size(name)) for name in (f"d/{n}" for n in store.files("d"))
    }
    for _ in range(1500):
        is_manifest = chance.random() < 0.3
        body = bytearray(manifest_body if is_manifest else node_body)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(len(body))
            body[at] = chance.choice((0, 0xFF, 0x7F, 0x80, body[at] ^ 1 << chance.randrange(8)))
        if chance.random() < 0.2:
            del body[chance.randrange(len(body)) :]
        if is_manifest:
            files = {**real, "manifest.ocdbt": wrapped(MANIFEST_MAGIC, bytes(body))}
        else:
            node = wrapped(NODE_MAGIC, bytes(body))
            height = body[0] if body else 0
            files = {
                **real,
                "d/x": node,
                "manifest.ocdbt": manifest("d/x", 0, len(node), height=height, n_keys=17),
            }
        with suppress(CheckpointingException):
            ocdbt.FORMAT.read(MemoryStore(files))


# ---- checkpoints that Orbax wrote


CASES = (
    "ocdbt_zarr2",
    "ocdbt_zarr2_raw",
    "ocdbt_zarr3",
    "plain_zarr2",
    "manager/10",
    "manager/10/state",
)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_orbax_are_read_bit_for_bit(golden: Path, case: str) -> None:
    if not (golden / "orbax").exists():
        pytest.skip("no checkpoint of Orbax is pinned yet")
    from safetensors.torch import load_file

    from tests.formats.dcp.test_format import plain_bytes

    expected = load_file(golden / "oracle" / "orbax" / "values.safetensors")
    catalog, store = opened(golden / "orbax" / case)
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor), key  # type: ignore[arg-type]
    assert catalog.iteration == 10
    paths = {entry.path for entry in entries(catalog.skeleton)}
    assert {
        ("params", "dense", "kernel"),
        ("opt_state", 0, "mu"),
        ("params", "embed.table"),
    } <= paths
