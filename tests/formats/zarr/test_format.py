"""Megatron's zarr directories and other zarr 2 hierarchies: read, written, broken."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr as zarr_python
from safetensors.torch import load_file

from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.stored import PlannedArray
from core.errors import (
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.dcp import torch_dist
from core.formats.zarr import format as zarr
from core.formats.zarr.array import TENSORSTORE_ONLY
from core.formats.zarr.metadata2 import parse_zarray
from core.megatron.extras.sharded_objects import is_sharded_object
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.objects import loaded
from core.pickle.inert import TensorLeaf, attributes, walk
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.materialize import tensor_bytes
from tests.support.zarr_files import (
    as_bytes,
    by_tensorstore,
    element_bytes,
    files_of,
    filled,
    source_of,
    written,
)

CASES = (
    "dense_gqa/tp2_pp2",
    "dense_gqa/tp4_pp1",
    "dense_gqa/tp2_pp2_optim",
    "dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
    "moe_seq/tp2_pp2_ep2",
)
SIBLINGS = {
    "dense_gqa/tp2_pp2": "mcore0121_torch_dist/dense_gqa/tp2_pp2",
    "dense_gqa/tp2_pp2_optim": "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
    "moe_seq/tp2_pp2_ep2": "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2",
}
"""Case → the torch_dist checkpoint that the same megatron-core wrote of the same state at the same
layout.
"""


def folder_of(golden: Path, case: str) -> Path:
    return golden / "mcore0121_zarr" / case / "iter_0000010"


def read(folder: Path) -> tuple[Catalog, LocalStore]:
    store = LocalStore(folder)
    return zarr.FORMAT.read(store), store


def read_torch_dist(golden: Path, case: str) -> tuple[Catalog, LocalStore]:
    store = LocalStore(golden / case / "iter_0000010")
    return torch_dist.FORMAT.read(store), store


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- reading what Megatron wrote


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_megatron_is_recognised_and_tells_its_common_state(
    golden: Path, case: str
) -> None:
    store = LocalStore(folder_of(golden, case))
    assert zarr.FORMAT.sniff(store)
    assert not torch_dist.FORMAT.sniff(store)
    catalog = zarr.FORMAT.read(store)
    assert catalog.iteration == 10
    assert catalog.common is not None and catalog.common["checkpoint_version"] == 3.0
    args = attributes(catalog.args)
    assert args is not None
    assert args["num_layers"] == 4
    leaves = [node for node in walk(catalog.common) if isinstance(node, TensorLeaf)]
    assert all(leaf.key in catalog.hidden for leaf in leaves)
    assert bool(leaves) == ("optim" in case or "distopt" in case)


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_the_oracle(golden: Path, case: str) -> None:
    catalog, store = read(folder_of(golden, case))
    oracle = load_file(golden / "oracle" / case.partition("/")[0] / "global.safetensors")
    compared = 0
    for name, tensor in oracle.items():
        values = canonical(catalog, store, name)
        assert values is not None, name
        rows = tensor.shape[0] if "embedding" in name or "output_layer" in name else None
        assert values[:rows].tobytes() == plain_bytes(tensor), name
        compared += 1
    assert compared > 20


def canonical(catalog: Catalog, store: LocalStore, name: str) -> np.ndarray[Any, Any] | None:
    """The bytes of one layer's (and expert's) tensor out of the stacked ones."""
    head, _, rest = name.partition("decoder.layers.")
    if head or not rest:
        return tensor_bytes(catalog, store, name) if name in catalog.tensors else None
    layer, _, sub = rest.partition(".")
    at = [int(layer)]
    if ".experts." in sub:
        before, _, after = sub.partition(".experts.")
        expert, _, last = after.partition(".")
        sub = f"{before}.experts.experts.{last}"
        at.append(int(expert))
    key = f"decoder.layers.{sub}"
    return tensor_bytes(catalog, store, key)[tuple(at)] if key in catalog.tensors else None


@pytest.mark.parametrize("case", ["tp2_pp2_optim", "tp2_pp1_dp2_distopt_fully_sharded_model_space"])
def test_optimizer_state_equals_the_oracle(golden: Path, case: str) -> None:
    catalog, store = read(folder_of(golden, f"dense_gqa/{case}"))
    oracle = load_file(golden / "oracle" / "dense_gqa" / "global_optim.safetensors")
    compared = 0
    for name, tensor in oracle.items():
        kind, _, rest = name.partition(".")
        head, _, below = rest.partition("decoder.layers.")
        layer, _, sub = below.partition(".")
        key = f"optimizer.state.{kind}.{f'decoder.layers.{sub}' if below and not head else rest}"
        values = tensor_bytes(catalog, store, key)
        values = values[int(layer)] if below and not head else values[: tensor.shape[0]]
        assert values.tobytes() == plain_bytes(tensor), name
        compared += 1
    assert compared > 60


@pytest.mark.parametrize(("case", "sibling"), SIBLINGS.items())
def test_the_catalog_is_that_of_the_torch_dist_checkpoint_of_the_same_run(
    golden: Path, case: str, sibling: str
) -> None:
    ours, store = read(folder_of(golden, case))
    theirs, their_store = read_torch_dist(golden, sibling)
    assert set(ours.tensors) == set(theirs.tensors)
    for key, meta in theirs.tensors.items():
        assert ours.tensors[key] == meta
        assert (
            tensor_bytes(ours, store, key).tobytes()
            == tensor_bytes(theirs, their_store, key).tobytes()
        ), key
    theirs = loaded(theirs, their_store)
    assert set(ours.objects) == set(theirs.objects)
    for key, item in theirs.objects.items():
        assert is_sharded_object(key)
        assert isinstance(ours.objects[key].value, list)
        assert type(ours.objects[key].value[0]) is type(item.value[0])  # type: ignore[index]
        if key.endswith("_extra_state/shard_0_4"):
            assert ours.objects[key].value == item.value == [None]
    assert ours.common is not None and set(ours.common) == set(theirs.common or {})


def test_locks_that_the_optimizer_left_are_ignored(golden: Path) -> None:
    folder = folder_of(golden, "dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space")
    locks = [path for path in folder.iterdir() if path.name.endswith(".sync")]
    assert locks and all((path / ".zarray").stat().st_size == 0 for path in locks)
    catalog, _ = read(folder)
    assert not any(".sync" in key for key in catalog.tensors)


def test_metadata_is_read_without_heavy_modules(golden: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from core.files.store import LocalStore;"
        " from core.formats.zarr import format as zarr;"
        "catalog = zarr.FORMAT.read(LocalStore(Path(sys.argv[1])));"
        "fragments = [catalog.fragments(key) for key in catalog.tensors];"
        "heavy = {'torch', 'numpy', 'zarr', 'tensorstore', 'numcodecs', 'zstandard'} & "
        "set(sys.modules);"
        "assert not heavy, heavy"
    )
    folder = str(folder_of(golden, "dense_gqa/tp2_pp2_optim"))
    subprocess.run(
        [sys.executable, "-c", code, folder], check=True, cwd=Path(__file__).resolve().parents[3]
    )


# ---- writing what Megatron would


@pytest.mark.parametrize(("case", "sibling"), SIBLINGS.items())
def test_a_torch_dist_checkpoint_written_as_zarr_is_the_one_that_megatron_wrote(
    golden: Path, tmp_path: Path, case: str, sibling: str
) -> None:
    source, store = read_torch_dist(golden, sibling)
    ours = files_of(written(source, store, zarr.FORMAT, tmp_path / "ours"))
    theirs = files_of(folder_of(golden, case))
    theirs = {name: data for name, data in theirs.items() if ".sync/" not in name}
    assert set(ours) == set(theirs)
    for name, data in theirs.items():
        if not name.endswith(".pt"):
            assert ours[name] == data, name
        elif "_extra_state" in name:  # random states and the arguments are each run's own
            assert described(ours[name]) == described(data)


def described(data: bytes) -> object:
    value = torch.load(io.BytesIO(data), weights_only=False)
    return repr(value)


@pytest.mark.parametrize("case", CASES)
def test_what_we_wrote_is_byte_for_byte_what_we_read(
    golden: Path, tmp_path: Path, case: str
) -> None:
    source, store = read(folder_of(golden, case))
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    ours = files_of(folder)
    for name, data in files_of(folder_of(golden, case)).items():
        if ".sync/" in name:
            assert name not in ours
        elif name.endswith(".pt"):
            assert described(ours[name]) == described(data), name
        else:
            assert ours[name] == data, name
    again, _ = read(folder)
    assert set(again.tensors) == set(source.tensors)
    assert set(again.objects) == set(source.objects)


def test_a_zarr_checkpoint_becomes_torch_dist(golden: Path, tmp_path: Path) -> None:
    source, store = read(folder_of(golden, "moe_seq/tp2_pp2_ep2"))
    folder = written(source, store, torch_dist.FORMAT, tmp_path / "ours")
    theirs, their_store = read_torch_dist(golden, "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2")
    ours_store = LocalStore(folder)
    ours = torch_dist.FORMAT.read(ours_store)
    assert set(ours.objects) == set(theirs.objects)
    for key, meta in theirs.tensors.items():
        assert ours.tensors[key] == meta
        assert (
            tensor_bytes(ours, ours_store, key).tobytes()
            == tensor_bytes(theirs, their_store, key).tobytes()
        ), key


def test_another_layout_gives_the_chunks_that_megatron_wrote_there(
    golden: Path, tmp_path: Path
) -> None:
    source, store = read(folder_of(golden, "dense_gqa/tp2_pp2"))
    unsharded = unshard(source, rules=load_rules(), target_tp=4)
    stacked = to_torch_dist(unsharded, Topology(tp=4), rules=load_rules())
    folder = filled(stacked.source, store, stacked.target, zarr.FORMAT, tmp_path / "ours")
    theirs = files_of(folder_of(golden, "dense_gqa/tp4_pp1"))
    arrays = {
        name: data for name, data in theirs.items() if not name.endswith((".pt", "metadata.json"))
    }
    ours = files_of(folder)
    assert len(arrays) > 100
    assert {name: ours.get(name) == data for name, data in arrays.items()} == dict.fromkeys(
        arrays, True
    )


def test_metadata_json_is_the_last_image() -> None:
    target = catalog_of_arrays(format="zarr", arrays={"w": PlannedArray("w", "float32", (2, 3))})
    images = zarr.lay_out(target)
    assert [image.path for image in images] == ["w/.zarray", "w/0.0", "common.pt", "metadata.json"]
    assert [image.is_metadata for image in images] == [False, False, False, True]


TYPES = [
    name
    for name, dtype in DTYPES.items()
    if dtype.kind != "bits" and name not in ("complex32", "float4_e2m1fn_x2")
]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "row": (7,),
    "square": (6, 10),
    "deep": (2, 3, 4),
}


def test_tensorstore_reads_every_type_and_shape_that_we_write(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{name}": (dtype, shape) for dtype in TYPES for name, shape in SHAPES.items()
    }
    chunks: dict[str, tuple[int, ...]] = {f"{dtype}.square": (3, 5) for dtype in TYPES}
    source, store = source_of(tensors, chunks=chunks)
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    for key, (dtype, shape) in tensors.items():
        assert (
            by_tensorstore(folder / key, "zarr").tobytes()
            == element_bytes(key, dtype, shape).tobytes()
        ), key
    assert sorted(path.name for path in (folder / "bfloat16.square").iterdir()) == [
        ".zarray",
        "0.0",
        "0.1",
        "1.0",
        "1.1",
    ]


def test_zarr_python_reads_what_we_write_in_the_types_that_it_knows(tmp_path: Path) -> None:
    names = [name for name in TYPES if name not in TENSORSTORE_ONLY]
    tensors = {
        f"{dtype}.{name}": (dtype, shape) for dtype in names for name, shape in SHAPES.items()
    }
    source, store = source_of(tensors)
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    for key, (dtype, shape) in tensors.items():
        array: Any = zarr_python.open_array(folder / key, mode="r", zarr_format=2)
        assert array.dtype == np.dtype(dtype)
        assert as_bytes(array[...]).tobytes() == element_bytes(key, dtype, shape).tobytes(), key


def test_tensors_without_elements_are_kept(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "a": ("bfloat16", (0, 4)),
        "b": ("int64", (3, 0)),
    }
    source, store = source_of(tensors)
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    assert json.loads((folder / "a" / ".zarray").read_bytes())["chunks"] == [1, 4]
    assert by_tensorstore(folder / "b", "zarr").shape == (3, 0, 8)
    catalog, _ = read(folder)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in catalog.tensors.items()} == tensors
    again = files_of(written(*read(folder), zarr.FORMAT, tmp_path / "again"))
    assert again == files_of(folder)


def test_keys_with_slashes_are_nested_directories(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model/w": ("int32", (3,)),
        "model/deep/w": ("int32", (4,)),
    }
    source, store = source_of(tensors)
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    assert (folder / "model" / "deep" / "w" / ".zarray").exists()
    catalog, store_of_ours = read(folder)
    assert set(catalog.tensors) == set(tensors)
    values = tensor_bytes(catalog, store_of_ours, "model/deep/w")
    assert values.tobytes() == element_bytes("model/deep/w", "int32", (4,)).tobytes()


@pytest.mark.parametrize(
    "key", ["a//b", "../a", "a/.b", ".hidden", "w.sync", "a\\b", "metadata.json", "x" * 300, "w/x"]
)
def test_keys_that_are_no_directory_are_refused(key: str) -> None:
    arrays = {name: PlannedArray(name, "float32", (2,)) for name in ("w", key)}
    with pytest.raises(UnsupportedError, match="--rename"):
        zarr.lay_out(catalog_of_arrays(format="zarr", arrays=arrays))


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2"])
def test_types_that_zarr_has_not_are_refused_with_a_way_out(dtype: str) -> None:
    target = catalog_of_arrays(format="zarr", arrays={"w": PlannedArray("w", dtype, (2,))})
    with pytest.raises(UnsupportedError, match=dtype) as caught:
        zarr.lay_out(target)
    assert caught.value.key == "w"
    assert caught.value.hint == "write a different format with --to"


def test_pieces_that_are_no_grid_become_one_chunk(tmp_path: Path) -> None:
    source, store = source_of({"w": ("float32", (7, 4))}, chunks={"w": (3, 4)})
    folder = written(source, store, zarr.FORMAT, tmp_path / "ours")
    assert (folder / "w" / "0.0").stat().st_size == 7 * 4 * 4
    assert (
        by_tensorstore(folder / "w", "zarr").tobytes()
        == element_bytes("w", "float32", (7, 4)).tobytes()
    )


def test_two_runs_give_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    source, store = read(folder_of(golden, "dense_gqa/tp2_pp2_optim"))
    first, two = (
        files_of(written(source, store, zarr.FORMAT, tmp_path / name)) for name in ("one", "two")
    )
    assert first == two


# ---- reading what others wrote

COMPRESSORS = ({"id": "zstd"}, {"id": "gzip"}, {"id": "zlib"}, {"id": "bz2"}, {"id": "blosc"}, None)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "compressor", COMPRESSORS, ids=lambda item: "plain" if item is None else item["id"]
)
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_tensorstore_writes_is_read(
    tmp_path: Path, compressor: dict[str, str] | None, separator: str, order: str
) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn", "<i4", ">f4", ">c8", "|b1"):
        metadata = {
            "shape": [7, 5, 6],
            "chunks": [3, 5, 4],
            "dtype": dtype,
            "compressor": compressor,
            "order": order,
            "dimension_separator": separator,
        }
        name = dtype.strip("<>|")
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/{name}/", "metadata": metadata}
        array = ts.open(spec, create=True).result()
        values = np.arange(7 * 5 * 6).reshape(7, 5, 6) % (2 if name == "b1" else 200)
        array.write(values.astype(array.dtype.numpy_dtype)).result()
    catalog, store = read(tmp_path)
    assert len(catalog.tensors) == 6
    for name in catalog.tensors:
        expected = by_tensorstore(tmp_path / name, "zarr")
        assert tensor_bytes(catalog, store, name).tobytes() == expected.tobytes(), name
        is_encoded = compressor is not None or name in ("f4", "c8")
        for fragment in catalog.fragments(name):
            assert fragment.array is not None
            assert (fragment.array.extent.encoding is not None) == is_encoded
            # Chunks are stored in full, also at the edges; padding at the end is not read.
            is_cut = fragment.box.shape == (1, 5, 4) and order == "C" and not is_encoded
            assert fragment.array.shape == ((1, 5, 4) if is_cut else (3, 5, 4))
    folder = written(catalog, store, zarr.FORMAT, tmp_path / "ours")
    for name in catalog.tensors:
        ours = by_tensorstore(folder / name, "zarr")
        assert ours.tobytes() == by_tensorstore(tmp_path / name, "zarr").tobytes(), name


def test_groups_that_zarr_python_writes_are_read(tmp_path: Path) -> None:
    root = zarr_python.open_group(tmp_path / "g", mode="w", zarr_format=2)
    values = np.arange(40, dtype="f8").reshape(8, 5)
    with zarr_python.config.set({"array.write_empty_chunks": True}):
        for path in ("top", "sub/a", "sub/deeper/b"):
            root.create_array(path, shape=(8, 5), chunks=(3, 2), dtype="f8")[...] = values
        root.create_array("scalar", shape=(), dtype="i8")[...] = 7
    folder = tmp_path / "g"
    assert zarr.FORMAT.sniff(LocalStore(folder))
    catalog, store = read(folder)
    assert set(catalog.tensors) == {"top", "sub/a", "sub/deeper/b", "scalar"}
    assert catalog.common is None
    for key in ("top", "sub/a", "sub/deeper/b"):
        assert tensor_bytes(catalog, store, key).tobytes() == values.tobytes()
    assert tensor_bytes(catalog, store, "scalar").tobytes() == np.int64(7).tobytes()


def test_a_single_array_is_a_tensor_called_array(tmp_path: Path) -> None:
    zarr_python.create_array(tmp_path / "one", shape=(4,), chunks=(2,), dtype="i4", zarr_format=2)[
        :
    ] = [1, 2, 3, 4]
    catalog, store = read(tmp_path / "one")
    assert list(catalog.tensors) == ["array"]
    assert tensor_bytes(catalog, store, "array").tobytes() == np.array([1, 2, 3, 4], "i4").tobytes()


@pytest.mark.parametrize("name", ["manifest.ocdbt", ".metadata", "zarr.json"])
def test_directories_of_other_formats_are_not_claimed(tmp_path: Path, name: str) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text("{}")
    assert zarr.FORMAT.sniff(LocalStore(tmp_path))
    (tmp_path / name).write_bytes(b"x")
    assert not zarr.FORMAT.sniff(LocalStore(tmp_path))


def test_checkpoints_of_others_are_not_claimed(golden: Path) -> None:
    for path in (
        "hf/llama/safetensors_sharded",
        "torch_dcp/fsdp2_dp2",
        "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010",
    ):
        assert not zarr.FORMAT.sniff(LocalStore(golden / path))


# ---- broken files

KEY = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_of(golden, "dense_gqa/tp2_pp2"), tmp_path / "copy"))


def test_a_missing_chunk_is_reported_not_zero_filled(copied: Path) -> None:
    (copied / KEY / "2.1.0").unlink()
    with pytest.raises(MissingShardError, match="15 of 16") as caught:
        read(copied)
    assert (caught.value.file, caught.value.key) == (f"{KEY}/2.1.0", KEY)


@pytest.mark.parametrize(("change", "error"), [(-1, TruncatedError), (1, CorruptError)])
def test_a_chunk_of_the_wrong_length_is_named(
    copied: Path, change: int, error: type[CorruptError]
) -> None:
    path = copied / KEY / "2.1.0"
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with pytest.raises(error) as caught:
        read(copied)
    assert (caught.value.file, caught.value.key) == (f"{KEY}/2.1.0", KEY)


@pytest.mark.parametrize("name", ["9.9.0", "4.0.0", "0.0", "0.0.0.0", "0", "00.0.0"])
def test_a_chunk_beyond_the_grid_is_named(copied: Path, name: str) -> None:
    (copied / KEY / name).write_bytes(b"x")
    with pytest.raises(CorruptError, match="outside the array's grid") as caught:
        read(copied)
    assert caught.value.file == f"{KEY}/{name}"


def test_files_that_are_no_chunks_do_not_matter(copied: Path) -> None:
    for name in (".zattrs", "0.0.0.__lock", "notes.txt"):
        (copied / KEY / name).write_bytes(b"{}")
    assert KEY in read(copied)[0].tensors


def test_a_missing_zarray_is_named(copied: Path) -> None:
    (copied / KEY / ".zarray").unlink()
    with pytest.raises(MissingShardError, match="hidden") as caught:
        read(copied)
    assert caught.value.file == f"{KEY}/.zarray"


def test_an_empty_directory_is_what_is_left_of_a_tensor(copied: Path) -> None:
    shutil.rmtree(copied / KEY)
    (copied / KEY).mkdir()
    with pytest.raises(MissingShardError, match="empty") as caught:
        read(copied)
    assert caught.value.key == KEY


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_a_missing_common_state_or_config_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    assert zarr.FORMAT.sniff(LocalStore(copied))
    with pytest.raises(MissingShardError, match=name.replace(".", r"\.")):
        read(copied)


def test_a_cut_object_is_named(copied: Path) -> None:
    path = copied / "rng_state" / "shard_0.1_2.2.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorruptError) as caught:
        read(copied)
    assert caught.value.file == "rng_state/shard_0.1_2.2.pt"


def test_an_object_that_runs_code_runs_nothing(copied: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path / 'run'}",)

    torch.save(Attack(), copied / "rng_state" / "shard_0.1_2.2.pt")
    catalog, _ = read(copied)
    assert "system" in repr(catalog.objects["rng_state/shard_0.1_2.2"].value)
    assert not (tmp_path / "run").exists()


GOOD: dict[str, object] = {
    "zarr_format": 2,
    "shape": [4, 6],
    "chunks": [2, 3],
    "dtype": "<f4",
    "compressor": None,
    "filters": None,
    "fill_value": None,
    "order": "C",
}


def zarray_of(**changes: object) -> bytes:
    return json.dumps(
        {name: value for name, value in {**GOOD, **changes}.items() if value != "absent"}
    ).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "absent"},
        {"chunks": "absent"},
        {"dtype": "absent"},
        {"zarr_format": "absent"},
        {"shape": [4]},
        {"shape": [4, -6]},
        {"shape": [4, 6.0]},
        {"shape": [4, True]},
        {"shape": [4, None]},
        {"shape": {"0": 4}},
        {"shape": [1 << 63, 6]},
        {"shape": [10**400, 6]},
        {"shape": [1 << 40, 1 << 40]},
        {"shape": [1] * 65, "chunks": [1] * 65},
        {"chunks": [0, 3]},
        {"chunks": [2, -3]},
        {"chunks": [1 << 61, 1 << 61]},
        {"chunks": None},
        {"order": "A"},
        {"order": 1},
        {"dimension_separator": "-"},
        {"dimension_separator": 7},
        {"compressor": "zstd"},
        {"compressor": {"level": 1}},
        {"compressor": {"id": 3}},
        {"filters": {"id": "delta"}},
        {"filters": [3]},
    ],
    ids=str,
)
def test_a_malformed_zarray_is_corrupt_and_named(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_zarray(zarray_of(**changes), file="w/.zarray", key="w")
    assert caught.value.file == "w/.zarray"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"shape": ' + b"9" * 5000 + b"}"]
)
def test_a_zarray_that_is_no_json_object_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_zarray(data, file="w/.zarray", key="w")
    assert caught.value.file == "w/.zarray"


@pytest.mark.parametrize(
    "dtype",
    [
        "|V2",
        "<V2",
        "|S5",
        "<U3",
        "<M8[ns]",
        "uint4",
        "float6_e3m2fn",
        "|f4",
        "=f4",
        "",
        [["a", "<f4"]],
        7,
    ],
)
def test_an_element_type_that_is_not_handled_is_refused_by_name(dtype: object) -> None:
    with pytest.raises(UnsupportedError, match="the dtype") as caught:
        parse_zarray(zarray_of(dtype=dtype), file="w/.zarray", key="w")
    assert caught.value.key == "w"


def test_zarr_3_metadata_in_a_zarray_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="is 3, not 2"):
        parse_zarray(zarray_of(zarr_format=3), file="w/.zarray", key="w")


def plain_group(**changes: object) -> MemoryStore:
    """One array of four chunks."""
    files: dict[str, bytes | bytearray] = {
        ".zgroup": b'{"zarr_format": 2}',
        "w/.zarray": zarray_of(**changes),
    }
    files |= {f"w/{name}": bytes(24) for name in ("0.0", "0.1", "1.0", "1.1")}
    return MemoryStore(files)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"compressor": {"id": "lz4"}}, "'lz4'"),
        ({"filters": [{"id": "delta", "dtype": "<f4"}]}, "'filter delta'"),
        ({"filters": [{"id": "zstd"}]}, "'filter zstd'"),
    ],
)
def test_a_codec_that_is_not_known_is_named_when_data_is_asked_for(
    changes: dict[str, object], name: str
) -> None:
    catalog = zarr.FORMAT.read(plain_group(**changes))
    assert catalog.tensors["w"].shape == (4, 6)
    with pytest.raises(UnsupportedError, match=name) as caught:
        catalog.fragments("w")
    assert caught.value.key == "w"


def test_a_hostile_shape_costs_nothing() -> None:
    store = plain_group(shape=[1 << 40, 6])
    with pytest.raises(MissingShardError, match="4 of 1099511627776") as caught:
        zarr.FORMAT.read(store)
    assert caught.value.file == "w/2.0"


def test_an_empty_tensor_with_an_absurd_axis_costs_nothing() -> None:
    store = MemoryStore({"w/.zarray": zarray_of(shape=[0, 1 << 60], chunks=[1, 1])})
    catalog = zarr.FORMAT.read(store)
    (fragment,) = catalog.fragments("w")
    assert fragment.box.is_empty


def test_a_hostile_chunk_shape_costs_nothing() -> None:
    store = plain_group(shape=[4, 6], chunks=[1 << 30, 1 << 28])
    del store.contents["w/0.1"], store.contents["w/1.0"], store.contents["w/1.1"]
    with pytest.raises(TruncatedError, match="24 bytes"):
        zarr.FORMAT.read(store)


def test_a_huge_zarray_is_not_read() -> None:
    store = plain_group()
    store.contents["w/.zarray"] = bytearray(2 << 20)
    with pytest.raises(CorruptError, match="the limit is"):
        zarr.FORMAT.read(store)


def test_links_that_lead_in_a_circle_are_not_followed(tmp_path: Path) -> None:
    for name, data in plain_group().contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "w/loop").symlink_to(tmp_path)
    catalog, _ = read(tmp_path)
    assert list(catalog.tensors) == ["w"]


def test_edge_chunks_may_hold_anything_beyond_the_tensor(tmp_path: Path) -> None:
    full = np.arange(36, dtype="<f4").reshape(6, 6)
    store = MemoryStore({".zgroup": b"{}", "w/.zarray": zarray_of(shape=[5, 4], chunks=[3, 3])})
    for row in range(2):
        for column in range(2):
            block = full[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            store.contents[f"w/{row}.{column}"] = bytearray(block.tobytes())
    catalog = zarr.FORMAT.read(store)
    assert tensor_bytes(catalog, store, "w").tobytes() == full[:5, :4].tobytes()
    folder = written(catalog, store, zarr.FORMAT, tmp_path / "ours")
    assert by_tensorstore(folder / "w", "zarr").tobytes() == full[:5, :4].tobytes()


def test_an_array_of_an_unknown_kind_is_shown_and_the_others_are_read() -> None:
    store = plain_group()
    store.contents["names/.zarray"] = bytearray(
        zarray_of(dtype="|O", filters=[{"id": "vlen-utf8"}])
    )
    catalog = zarr.FORMAT.read(store)
    assert list(catalog.tensors) == ["w"]
    assert "the dtype" in str(catalog.objects["names"].value)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "|O"},
        {"dtype": "|O", "filters": [{"id": "pickle"}]},
        {"dtype": "|O", "filters": [{"id": "zstd"}]},
        {"dtype": [["a", "<f4"], ["b", "|O"]]},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}},
    ],
)
def test_an_array_of_pickles_is_unsafe_and_the_others_are_read(
    changes: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(UnsafeError, match="pickles"):
        parse_zarray(zarray_of(**changes), file="names/.zarray", key="names")
    store = plain_group()
    store.contents["names/.zarray"] = bytearray(zarray_of(**changes))
    for name, data in store.contents.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(data)
    assert list(zarr.FORMAT.read(store).tensors) == ["w"]
    with pytest.raises(UnsafeError, match="Pickle.decode"):
        run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="dcp", fsync=False))
    run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="dcp", exclude=("names",), fsync=False))
    for level in Level:
        findings = [
            item
            for item in validate(tmp_path / "src", level=level).findings
            if item.severity == Severity.ERROR
        ]
        assert [(finding.code, finding.file, finding.key) for finding in findings] == [
            ("CK601", "names/.zarray", "names")
        ]


@pytest.mark.parametrize("name", ["order", "fill_value", "compressor", "filters"])
def test_what_tensorstore_wants_may_be_null_but_not_absent(name: str) -> None:
    metadata = {
        "zarr_format": 2,
        "shape": [2],
        "chunks": [2],
        "dtype": "<f4",
        "order": "C",
        "fill_value": None,
        "compressor": None,
        "filters": None,
    }
    parse_zarray(json.dumps(metadata).encode(), file=".zarray", key="w")
    del metadata[name]
    with pytest.raises(CorruptError, match=name):
        parse_zarray(json.dumps(metadata).encode(), file=".zarray", key="w")
