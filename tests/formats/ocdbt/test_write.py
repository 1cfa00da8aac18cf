"""What is written in Orbax's format is opened by tensorstore, as Orbax opens it, and read back.

``tests/golden/frameworks/orbax_restore.py`` restores it with Orbax itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch

from core.engine.catalog.catalog import catalog_of_arrays
from core.engine.catalog.facets import WriteOptions
from core.engine.catalog.stored import PlannedArray
from core.errors import UnsupportedError
from core.files.store import LocalStore
from core.formats.ocdbt.entries import list_entries
from core.formats.ocdbt.format import FORMAT
from core.formats.ocdbt.node_writer import encode_database
from core.formats.ocdbt.nodes import UnfoldBudget, parse_newest_version
from core.formats.ocdbt.write import lay_out
from core.opening.open import open_checkpoint
from core.pickle.nesting import entries
from core.verbs.convert.run import Job, run
from tests.support.materialize import tensor_bytes


def converted(folder: Path, content: object, name: str = "out", **options: Any) -> Any:
    torch.save(content, folder / "in.pt")
    return run(Job(src=folder / "in.pt", dst=folder / name, to="orbax", fsync=False, **options))


def array_in(item: Path, name: str) -> np.ndarray[Any, Any]:
    store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}).result().read().result()


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = int(np.prod(shape)) * dtype.itemsize
    return torch.arange(n, dtype=torch.int64).to(torch.uint8).view(dtype).reshape(shape)


DTYPES = (torch.bfloat16, torch.float16, torch.int64, torch.uint32, torch.complex64)
DTYPES += (torch.float8_e4m3fn, torch.float8_e5m2)


def test_tensorstore_reads_every_array_bit_for_bit(tmp_path: Path) -> None:
    tensors = {f"params.{'layer' * 40}.{number:05}": counted(3) for number in range(500)}
    tensors |= {f"dtype.{dtype}": counted(3, 5, dtype=dtype) for dtype in DTYPES}
    tensors |= {"flag": torch.tensor([True, False]), "empty": torch.zeros(0, 3), "one": counted()}
    converted(tmp_path, tensors, max_shard_size=2000, verify=True)

    store = {"driver": "ocdbt", "base": f"file://{tmp_path / 'out'}/"}
    database = ts.KvStore.open(store).result()
    keys = database.list().result()
    assert len(keys) == 2 * len(tensors) - 1  # the empty array has no chunk
    for name in [*tensors][499:]:
        value = array_in(tmp_path / "out", name)
        tensor = tensors[name]
        assert value.shape == tuple(tensor.shape)
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if value.size else b""
        assert value.tobytes() == expected, name


def test_a_tree_of_three_levels_is_walked(tmp_path: Path) -> None:
    """Long keys fill the nodes."""
    entries = {f"{number:02}{'k' * 60_000}": f"value {number}".encode() for number in range(40)}
    nodes, manifest = encode_database(entries, file="d/nodes")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/nodes").write_bytes(nodes)
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    assert parse_newest_version(manifest, UnfoldBudget()).height == 2
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert len(database.list().result()) == 40
    assert {key: database.read(key).result().value for key in entries} == entries
    assert list_entries(LocalStore(tmp_path)) == entries


@pytest.mark.parametrize("shape", [(7, 3), (1, 7, 3), (2, 3, 40), (3, 1, 96)])
def test_long_arrays_are_bands_of_one_run(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Also of rows that the bands do not divide, and of rows that are longer than a band."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    array = PlannedArray("w", "float32", shape)
    target = replace(
        catalog_of_arrays(format="orbax", arrays={"w": array}), write=WriteOptions(shard_bytes=24)
    )
    for image in lay_out(target):
        data = bytearray(image.size)
        for placed in image.arrays:
            data[placed.offset : placed.offset + values.nbytes] = values.tobytes()
        for offset, literal in image.literals(lambda name: 0):
            data[offset : offset + len(literal)] = literal
        (tmp_path / image.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / image.path).write_bytes(data)
    assert array_in(tmp_path, "w").tobytes() == values.tobytes()
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.catalog.fragments("w")) > 1
    assert tensor_bytes(checkpoint.catalog, checkpoint.store, "w").tobytes() == values.tobytes()
    checkpoint.store.close()


TREE = {
    "params": {"dense": {"kernel": counted(3, 4)}, "embed.table": counted(2)},
    "opt": [{"count": torch.tensor(3), "mu": counted(2)}, None, {}, []],
    "step": 7,
    "lr": 0.125,
    "flag": True,
    "name": "run é",
    "settings": {"betas": (0.9, 0.95), "none": None},
}


def test_the_tree_keeps_its_nesting(tmp_path: Path) -> None:
    result = converted(tmp_path, {**TREE, "raw": b"bytes", "args": {1: {2, 3}}})
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.iteration == 7
    paths = {entry.path for entry in entries(checkpoint.catalog.skeleton)}
    assert ("params", "embed.table") in paths
    assert ("opt", 0, "mu") in paths
    assert ("settings", "betas", 1) in paths
    assert checkpoint.catalog.objects["name"].value == "run é"
    assert checkpoint.catalog.objects["opt.1"].value is None
    checkpoint.store.close()
    # Numbers are arrays without axes.
    numbers = {"step": 7, "lr": 0.125, "flag": True, "settings.betas.1": 0.95}
    assert {name: array_in(tmp_path / "out", name)[()] for name in numbers} == numbers
    # What Orbax has no leaf for is listed, not lost silently.
    assert any(line.startswith("raw (Orbax trees cannot contain bytes") for line in result.dropped)
    assert any(line.startswith("args") for line in result.dropped)


def test_a_name_that_is_a_number_makes_a_step_of_a_manager(tmp_path: Path) -> None:
    converted(tmp_path, {"w": counted(4)}, name="run/10")
    step = tmp_path / "run" / "10"
    metadata: Mapping[str, Any] = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    assert set(metadata["item_handlers"]) == {"default"}
    assert array_in(step / "default", "w").tobytes() == counted(4).numpy().tobytes()
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.format is FORMAT
    assert list(checkpoint.catalog.tensors) == ["w"]
    checkpoint.store.close()


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as raised:
        converted(tmp_path, {"a": [1, 2], "a.0": counted(2)})
    assert raised.value.key == "a.0"
    assert not (tmp_path / "out").exists()


def test_an_iteration_without_a_scalar_is_kept(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_torch_dist/dense_gqa/tp2_pp2"
    run(Job(src=source, dst=tmp_path / "out", to="orbax", fsync=False, drop_unknown=True))
    checkpoint = open_checkpoint(tmp_path / "out")
    original = open_checkpoint(source)
    assert checkpoint.iteration == original.iteration is not None
    checkpoint.store.close()
    original.store.close()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_element_types_of_jax_are_read_cast_and_written(driver: str, tmp_path: Path) -> None:
    """Values of less than a byte have a byte each, as Orbax stores them."""
    names = ("int4", "int2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz")
    values = {name: np.arange(-2, 2).astype(getattr(ml_dtypes, name)) for name in names}
    for name, value in values.items():
        store = {"driver": "ocdbt", "base": f"file://{tmp_path / 'src'}/", "path": f"{name}/"}
        spec = {"driver": driver, "kvstore": store, "create": True}
        ts.open(spec, dtype=ts.dtype(name), shape=value.shape).result().write(value).result()
    run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="orbax", fsync=False, verify=True))
    for name, value in values.items():
        array = array_in(tmp_path / "out", name)
        assert array.dtype == value.dtype
        assert array.tobytes() == value.tobytes(), name
    # Casts give numbers that torch has; without one it has no such type.
    dtypes = tuple((name, "float32") for name in names)
    run(Job(src=tmp_path / "src", dst=tmp_path / "out.pt", to="torch", dtype=dtypes, fsync=False))
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in values.items():
        assert (state[name].numpy() == value.astype(np.float32)).all(), name
    for dtype, to in (("float8_e3m4", "torch"), ("int4", "dcp"), ("int4", "safetensors")):
        other_names = tuple(name for name in names if name != dtype)
        job = Job(
            src=tmp_path / "src", dst=tmp_path / "no", to=to, exclude=other_names, fsync=False
        )
        with pytest.raises(UnsupportedError) as raised:
            run(job)
        assert raised.value.key == dtype
    # torch has int4 as a name, and loads its bytes.
    rest = tuple(name for name in names if not name.startswith("int"))
    run(Job(src=tmp_path / "src", dst=tmp_path / "i.pt", to="torch", exclude=rest, fsync=False))
    int4 = torch.load(tmp_path / "i.pt", weights_only=True)["int4"]
    assert int4.dtype == torch.int4
    assert int4.view(torch.uint8).numpy().tobytes() == values["int4"].tobytes()


def dtypes_in(path: Path) -> dict[str, str]:
    """Return the dtypes of a checkpoint's tensors."""
    checkpoint = open_checkpoint(path)
    checkpoint.store.close()
    return {key: tensor.dtype for key, tensor in checkpoint.catalog.tensors.items()}


@pytest.mark.parametrize(
    ("dtype", "to"),
    [("float8_e3m4", "torch"), ("int4", "dcp"), ("int4", "safetensors")],
)
def test_the_hint_on_an_element_type_names_all_tensors_of_it_and_no_other(
    dtype: str, to: str, tmp_path: Path
) -> None:
    names = {f"layers.{n}.w": dtype for n in range(3)} | {"head": dtype, "other": "bfloat16"}
    for name, own in names.items():
        value = np.arange(-2, 2).astype(getattr(ml_dtypes, own))
        store = {"driver": "ocdbt", "base": f"file://{tmp_path / 'src'}/", "path": f"{name}/"}
        spec = {"driver": "zarr3", "kvstore": store, "create": True}
        ts.open(spec, dtype=ts.dtype(own), shape=value.shape).result().write(value).result()
    job = Job(src=tmp_path / "src", dst=tmp_path / "out", to=to, fsync=False)
    with pytest.raises(UnsupportedError, match="or the dtypes of 3 other tensors") as raised:
        run(job)
    cast, skip = (raised.value.hint or "").split(", or skip with ")
    words = shlex.split(cast.removeprefix("cast with "))
    assert words[::2] == ["--dtype"] * 2
    rules = tuple((key, name) for key, _, name in (word.partition("=") for word in words[1::2]))
    run(replace(job, dtype=rules))
    assert sorted(dtypes_in(tmp_path / "out").values()) == ["bfloat16", *["float32"] * 4]
    words = shlex.split(skip)
    run(replace(job, dst=tmp_path / "rest", exclude=tuple(words[1::2])))
    assert dtypes_in(tmp_path / "rest") == {"other": "bfloat16"}


def test_names_of_more_than_255_bytes_are_keys_that_tensorstore_finds(tmp_path: Path) -> None:
    """Keys of a database are no names of files."""
    names = [f"{'x' * n}{n}" for n in (255, 300, 5000)]
    torch.save({name: torch.arange(3.0) + len(name) for name in names}, tmp_path / "in.pt")
    run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out", to="orbax"))
    for name in names:
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/out/", "path": f"{name}/"}
        array = ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()
        assert array.tolist() == [n + len(name) for n in range(3)]
    run(Job(src=tmp_path / "out", dst=tmp_path / "back.pt", to="torch"))
    assert torch.load(tmp_path / "back.pt").keys() == {*names}
