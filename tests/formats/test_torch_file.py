"""The format ``torch``: what torch.save writes is read, and what is written torch.load reads."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import io
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

from core.box import Shape, c_strides
from core.catalog import Catalog, Extent, StoredArray, StoredObject
from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsafeError, UnsupportedError
from core.formats.torch_aside import ASIDE_KEY, ROOT_KEY
from core.formats.torch_file import FORMAT, item_location, lay_out, load_object, parse, plan_tree, read
from core.inert import Inert, ObjectLeaf, TensorLeaf, as_mapping, attributes
from core.pickle_writer import dumps
from core.plain import to_plain
from core.store import LocalStore, MemoryStore, ReadStore
from core.target import partitioned
from core.transform import select
from tests.materialize import materialized, tensor_bytes

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex128, torch.complex64, torch.complex32,
)  # fmt: skip


def filled(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are all its own: a function of index, shape and seed."""
    size = torch.empty(0, dtype=dtype).element_size()
    n = int(np.prod(shape, dtype=np.int64)) * size
    generator = np.random.default_rng([seed, n, *shape])
    raw = generator.integers(0, 256 if dtype != torch.bool else 2, size=n, dtype=np.uint8)
    return torch.frombuffer(bytearray(raw.tobytes()) or bytearray(1), dtype=torch.uint8)[:n].view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous()
    return b"" if not dense.numel() else dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(mine: Any, expected: Any) -> None:
    """Equal types, nesting and order; tensors equal bit for bit."""
    assert type(mine) is type(expected), f"{type(mine)} for {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (mine.dtype, mine.shape, mine.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
        assert bits(mine) == bits(expected)
    elif isinstance(expected, dict):
        assert list(mine) == list(expected)
        for key, item in expected.items():
            assert_same(mine[key], item)
    elif isinstance(expected, (list, tuple)):
        assert len(mine) == len(expected)
        for one, other in zip(mine, expected, strict=True):
            assert_same(one, other)
    else:
        assert mine == expected


def saved(value: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def opened(data: bytes, name: str = "f.pt") -> tuple[Catalog, MemoryStore]:
    store = MemoryStore({name: data}, entry=name)
    assert FORMAT.sniff(store)
    return FORMAT.read(store), store


def written(catalog: Catalog, store: ReadStore) -> bytes:
    target = partitioned(catalog, format="torch", by="whole")
    images = lay_out(target)
    (data,) = materialized(images, target=target, source=catalog, store=store).values()
    return data


def rewritten(data: bytes) -> bytes:
    catalog, store = opened(data)
    return written(catalog, store)


def loads(data: bytes, path: Path, *, weights_only: bool = True) -> Iterator[Any]:
    """What every way of loading makes of a file."""
    path.write_bytes(data)
    yield torch.load(path, weights_only=weights_only)
    yield torch.load(path, weights_only=False)
    yield torch.load(path, weights_only=weights_only, mmap=True)
    yield torch.load(io.BytesIO(data), weights_only=weights_only)


def entry_bytes(catalog: Catalog, store: ReadStore, key: str) -> bytes:
    return tensor_bytes(catalog, store, key).tobytes()


def kinds_of(dtype: torch.dtype) -> dict[str, Any]:
    base = filled(dtype, 6, 5, seed=1)
    storage = filled(dtype, 60, seed=2)
    return {
        "whole": base,
        "same again": base,
        "rows": base[2:4],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "strided": storage[3:40:4],
        "blocks": storage.as_strided((3, 2, 2), (1, 20, 5), 7),
        "scalar": filled(dtype, seed=3),
        "one of many": storage[17],
        "expanded": filled(dtype, 1, seed=4).expand(3, 4),
        "channels last": filled(dtype, 2, 3, 4, 5, seed=5).permute(0, 3, 1, 2),
        "empty": filled(dtype, 0),
        "empty matrix": filled(dtype, 3, 0, 2),
        "empty view": storage[4:4],
        "ones": filled(dtype, 1, 7, 1, seed=6),
        "nested": {"list": [storage[:5], (storage[5:6], {"deep": base[1]})]},
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_read_and_written_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    value = kinds_of(dtype)
    catalog, store = opened(saved(value))
    flat = {"nested.list.0": value["nested"]["list"][0], "nested.list.1.0": value["nested"]["list"][1][0]}
    flat |= {"nested.list.1.1.deep": value["nested"]["list"][1][1]["deep"]}
    flat |= {key: item for key, item in value.items() if key != "nested"}
    assert sorted(catalog.tensors) == sorted(flat)
    for key, tensor in flat.items():
        assert catalog.tensors[key].shape == tuple(tensor.shape)
        assert f"torch.{catalog.tensors[key].dtype}" == str(dtype)
        assert entry_bytes(catalog, store, key) == bits(tensor), key
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_parameters_and_requires_grad_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {
        "parameter": torch.nn.Parameter(filled(dtype, 3, 2)),
        "frozen": torch.nn.Parameter(filled(dtype, 4), requires_grad=False),
        "leaf": filled(dtype, 5).requires_grad_(dtype != torch.float8_e4m3fn),  # torch cannot load what it saves
        "number": torch.nn.Parameter(filled(torch.int64, 5), requires_grad=False),
    }
    catalog, store = opened(saved(value))
    assert catalog.skeleton["parameter"] == TensorLeaf("parameter", "parameter", True)
    assert catalog.skeleton["leaf"] == TensorLeaf("leaf", None, dtype != torch.float8_e4m3fn)
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, value)


def test_tensors_that_share_a_storage_share_it_again(tmp_path: Path) -> None:
    weight = filled(torch.float32, 40, 30)
    other = filled(torch.float32, 40, 30, seed=9)
    data = saved({"embedding": weight, "other": other, "head": weight, "view": weight.t()})
    catalog, store = opened(data)
    assert catalog.attrs["aliases"] == {"head": "embedding"}
    new = written(catalog, store)
    loaded = torch.load(io.BytesIO(new))
    assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()
    assert_same(loaded, torch.load(io.BytesIO(data)))


def test_aliases_that_became_different_are_stored_apart() -> None:
    weight = filled(torch.float32, 4, 3)
    catalog, _ = opened(saved({"a": weight, "b": weight, "c": weight}))
    changed = {**catalog.tensors, "b": replace(catalog.tensors["b"], dtype="bfloat16")}
    target = partitioned(replace(catalog, tensors=changed), format="torch", by="whole")
    (image,) = lay_out(target)
    assert [placed.array.name for placed in image.arrays] == ["a", "b"]
    without, _ = opened(saved({"a": weight, "b": weight, "c": weight}))
    target = partitioned(select(without, exclude=["a"]).catalog, format="torch", by="whole")
    assert [placed.array.name for placed in lay_out(target)[0].arrays] == ["b"], "b and c still share"


def test_a_record_that_is_just_the_tensor_lends_its_crc() -> None:
    storage = filled(torch.float32, 12)
    data = saved({"whole": storage.view(3, 4), "part": storage[:6], "turned": storage.view(3, 4).t()})
    catalog, _ = opened(data)
    crcs = {key: catalog.fragments(key)[0].array.extent.crc for key in catalog.tensors}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert crcs == {"whole": archive.getinfo("archive/data/0").CRC, "part": None, "turned": None}
    torch.serialization.set_crc32_options(False)
    try:
        catalog, store = opened(saved({"whole": storage}))
    finally:
        torch.serialization.set_crc32_options(True)
    assert catalog.fragments("whole")[0].array.extent.crc is None
    with zipfile.ZipFile(io.BytesIO(written(catalog, store))) as archive:
        assert archive.testzip() is None


def test_a_written_file_has_right_crcs_and_offsets(tmp_path: Path) -> None:
    value = {"a": filled(torch.float32, 9, 9), "e": filled(torch.int8, 0), "b": filled(torch.float8_e5m2, 7)}
    data = rewritten(saved(value))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    path = tmp_path / "new.pt"
    path.write_bytes(data)
    with config.patch("load.calculate_storage_offsets", True):
        assert_same(torch.load(path, mmap=True), value)
    loaded = torch.load(path, map_location="meta")
    catalog, _ = opened(data)
    for key in ("a", "b"):
        extent = catalog.fragments(key)[0].array.extent
        assert loaded[key].untyped_storage()._checkpoint_offset == extent.offset
        assert extent.offset % 64 == 0


def test_torchs_own_check_of_offsets_accepts_a_written_file(tmp_path: Path) -> None:
    value = {f"k{n}": filled(torch.int16, n % 5, 3, seed=n) for n in range(40)}
    path = tmp_path / "new.pt"
    path.write_bytes(rewritten(saved(value)))
    script = (
        "import sys, torch; from torch.utils.serialization import config; "
        "config.load.calculate_storage_offsets = True; "
        "torch.load(sys.argv[1]); torch.load(sys.argv[1], mmap=True); print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={"TORCH_SERIALIZATION_DEBUG": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_writing_is_a_function_of_the_content() -> None:
    data = saved({"b": filled(torch.float32, 3), "a": [1, {"x": filled(torch.int8, 2)}]})
    once = rewritten(data)
    assert rewritten(data) == once
    assert rewritten(once) == once


def test_plain_values_keep_their_places_and_types(tmp_path: Path) -> None:
    value = {
        "tensor": filled(torch.float32, 2),
        "none": None, "yes": True, "int": -5, "big": 1 << 200, "float": 0.1, "list": [float("inf")],
        "text": "grün\ud800", "bytes": b"\0\xff", "array": bytearray(b"abc"), "complex": 1 - 2j,
        "set": {1, "a"}, "empty": {}, "none in it": [], "tuple": (1, (2, [3])),
        "dtype": torch.bfloat16, "device": torch.device("cuda", 3),
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict([("z", 1), ("a", filled(torch.int8, 3))]),
        5: "five", (1, 2): "pair", None: "nothing", (torch.float32, torch.bfloat16): {"param": filled(torch.int8, 4)},
    }  # fmt: skip
    catalog, store = opened(saved(value))
    assert list(catalog.tensors) == ["tensor", "ordered.a", "(torch.float32, torch.bfloat16).param"]
    assert catalog.objects["int"] == StoredObject("int", value=-5)
    assert catalog.objects["tuple"].value == (1, (2, [3]))
    assert catalog.objects["5"].value == "five"
    new = written(catalog, store)
    for loaded in loads(new, tmp_path / "new.pt"):
        assert_same(loaded, value)


def test_the_metadata_of_an_ordered_state_dict_stays(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = model.state_dict()
    for loaded in loads(rewritten(saved(state)), tmp_path / "new.pt"):
        assert_same(loaded, state)
        assert loaded._metadata == state._metadata
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).load_state_dict(loaded)


class Colour(enum.Enum):
    RED = 1


class Thing:
    """A class that torch does not know."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and list(self.__dict__) == list(other.__dict__)


def refused() -> dict[str, Any]:
    """A state dict that weights_only refuses at many places."""
    moments: Any = collections.defaultdict(dict)
    moments[0] = {"exp_avg": filled(torch.float32, 3)}
    moments["late"] = argparse.Namespace(deep=filled(torch.int8, 2))
    shared = argparse.Namespace(lr=0.1, kinds=[Colour.RED, signal()])
    return {
        "args": shared,
        "model": collections.OrderedDict(w=filled(torch.float32, 2, 2), thing=Thing(a=1)),
        "again": [shared, {"x": filled(torch.int8, 5)}, (np.arange(3), filled(torch.int8, 6)), 7],
        "optimizer": {"state": moments, "group": [{"lr": np.float64(0.5)}]},
        "seed": (3, np.array([1, 2], dtype=np.uint32)),
        "kinds": frozenset({1, 2}),
        "end": 5,
        ("key", frozenset({1})): "odd key",
    }


def signal() -> object:
    import signal

    return signal.SIGTERM


def skeleton_of(data: bytes) -> object:
    return to_plain(opened(data)[0].skeleton)


def test_what_weights_only_refuses_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    data = saved(refused())
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(data))
    new = rewritten(data)
    for loaded in loads(new, tmp_path / "new.pt"):
        assert list(loaded) == ["model", "again", "optimizer", "end", ASIDE_KEY]
        assert_same(loaded["model"], collections.OrderedDict(w=filled(torch.float32, 2, 2)))
        assert_same(loaded["again"][1], {"x": filled(torch.int8, 5)})
        assert_same(loaded["optimizer"]["state"], {0: {"exp_avg": filled(torch.float32, 3)}})
        entries = loaded[ASIDE_KEY]["entries"]
        assert entries[0]["path"] == ["args"]
        assert entries[0]["value"]["state"]["lr"] == 0.1
    assert skeleton_of(new) == skeleton_of(data)
    assert list(opened(new)[0].tensors) == list(opened(data)[0].tensors)
    assert rewritten(new) == new


@pytest.mark.parametrize(
    "root",
    [
        argparse.Namespace(a=1, t=filled(torch.int8, 3)),
        [filled(torch.int8, 3), argparse.Namespace(a=1), {"b": Thing()}],
        (filled(torch.int8, 3), {"n": np.arange(4)}),
        collections.OrderedDict(a=Thing(x=1), t=filled(torch.int8, 3)),
        collections.defaultdict(list, a=Thing(x=1), t=filled(torch.int8, 3)),
        collections.defaultdict(dict, t=filled(torch.int8, 3)),
        np.arange(3),
    ],
)
def test_any_root_is_set_aside_and_comes_back(root: object, tmp_path: Path) -> None:
    data = saved(root)
    new = rewritten(data)
    assert skeleton_of(new) == skeleton_of(data)
    for loaded in loads(new, tmp_path / "new.pt"):
        assert ASIDE_KEY in loaded
        assert (ROOT_KEY in loaded) == isinstance(root, (list, tuple))


@pytest.mark.parametrize(
    "entries",
    [
        3,
        [{"path": [[]]}],
        [{"path": [["x"]], "value": 1}],
        [{"path": ["b", "c"], "value": 1}],
        [{"path": ["a", 7], "value": 1}],
        [{"path": [], "value": {"$tuple": 3}}],
    ],
)
def test_a_malformed_reserved_entry_is_an_error_of_ours(entries: object) -> None:
    for note in (entries, {"entries": entries}, {"version": 2, "entries": []}, {"version": 1, "entries": entries}):
        with pytest.raises(CorruptError):
            opened(saved({"a": [1, {}], "b": 5, ASIDE_KEY: note}))


def test_a_reserved_key_of_somebody_else_is_not_overwritten() -> None:
    catalog = replace(opened(saved({"a": argparse.Namespace()}))[0], skeleton={"a": Inert("newobj", 1), ASIDE_KEY: 3})
    with pytest.raises(UnsupportedError, match="reserved key"):
        lay_out(catalog)


def test_keys_that_join_to_one_name_are_told_apart(tmp_path: Path) -> None:
    value = {
        "a.b": filled(torch.int8, 2), "a": {"b": filled(torch.int8, 3), "c": 5}, "a.c": 6,
        1: filled(torch.int8, 4), "1": filled(torch.int8, 5), "#0": filled(torch.int8, 6), "": filled(torch.int8, 7),
        "n": argparse.Namespace(hidden=filled(torch.int8, 8)),
    }  # fmt: skip
    data = saved(value)
    catalog, store = opened(data)
    sizes = {key: meta.shape[0] for key, meta in catalog.tensors.items()}
    assert {"a\\.b": 2, "a.b": 3, "1": 4, "1~2": 5}.items() <= sizes.items()
    assert len(sizes) == 6
    assert len(catalog.hidden) == 1
    assert not catalog.hidden.keys() & catalog.tensors.keys()
    assert catalog.objects["a.c"].value == 5
    assert catalog.objects["a\\.c"].value == 6
    assert catalog.skeleton["a.c"] == ObjectLeaf("a\\.c")
    loaded = torch.load(io.BytesIO(written(catalog, store)))
    del value["n"], loaded[ASIDE_KEY]
    assert_same(loaded, value)


def test_a_bare_tensor_is_a_checkpoint(tmp_path: Path) -> None:
    catalog, store = opened(saved(filled(torch.float32, 3, 4).t()))
    assert list(catalog.tensors) == ["value"]
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, filled(torch.float32, 3, 4).t())


@pytest.mark.parametrize("value", [None, 5, "text", [1, 2], {}, ()])
def test_a_file_without_tensors_is_read_and_written(value: object) -> None:
    catalog, store = opened(saved(value))
    assert not catalog.tensors
    assert [item.value for item in catalog.objects.values()] == ([value] if value != {} else [])
    assert_same(torch.load(io.BytesIO(written(catalog, store))), value)


def test_a_flat_catalog_becomes_a_dict(tmp_path: Path) -> None:
    catalog, store = opened(saved({"a": {"b": filled(torch.int8, 3)}, "c": 5}))
    for loaded in loads(written(replace(catalog, skeleton=None), store), tmp_path / "new.pt"):
        assert_same(loaded, {"a.b": filled(torch.int8, 3), "c": 5})


def test_object_leaves_are_filled_in() -> None:
    catalog, store = opened(saved({"a": filled(torch.int8, 3), "c": 5}))
    leaved = replace(catalog, skeleton={"a": TensorLeaf("a"), "c": ObjectLeaf("c")})
    assert torch.load(io.BytesIO(written(leaved, store)))["c"] == 5
    unread = replace(leaved, objects={"c": StoredObject("c", raw_key="raw:c")})
    with pytest.raises(UnsupportedError, match="not read yet"):
        lay_out(unread)


def test_iteration_and_args_are_told() -> None:
    catalog, _ = opened(saved({"iteration": 12, "args": argparse.Namespace(lr=1.5), "w": filled(torch.int8, 1)}))
    assert catalog.attrs["iteration"] == 12
    assert attributes(catalog.attrs["args"]) == {"lr": 1.5}
    assert catalog.version == "3"


class Subclass(torch.Tensor):
    """A subclass of our own."""


def bare_storage() -> object:
    return filled(torch.int8, 4).untyped_storage()


UNSUPPORTED: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8), "quantized tensor"),
    "per channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "quantized tensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor"),
    "conj": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "view with the conj bit"),
    "neg": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "view with the neg bit"),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "tensor of dtype bits8"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "tensor of the class .*Subclass"),
    "expanded": (lambda: torch.ones(1).expand(1 << 40), "expanded view of more than 4 GiB"),
    "parameter": (lambda: torch.nn.Parameter(torch.empty(3, device="meta")), "meta tensor"),
    "storage": (bare_storage, "bare storage"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_handled_is_shown_and_not_copied(name: str) -> None:
    make, kind = UNSUPPORTED[name]
    catalog, store = opened(saved({"fine": filled(torch.int8, 3), "odd": {name: make()}}))
    assert list(catalog.tensors) == ["fine"]
    key = f"odd.{name}"
    assert list(catalog.attrs["unsupported"]) == [key]
    assert key in catalog.objects
    with pytest.raises(UnsupportedError, match=kind) as caught:
        written(catalog, store)
    assert caught.value.key == key
    rest = select(catalog, exclude=["odd.*"]).catalog
    assert_same(torch.load(io.BytesIO(written(rest, store))), {"fine": filled(torch.int8, 3)})


def test_tensors_with_python_attributes_are_read_without_them(tmp_path: Path) -> None:
    plain = filled(torch.float32, 3)
    marked = filled(torch.float32, 4)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(filled(torch.float32, 5))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    catalog, store = opened(saved({"plain": plain, "marked": marked, "parameter": parameter}))
    assert catalog.attrs["notes"] == (
        "2 tensors carry Python attributes (partition_dim, tensor_model_parallel), which are not kept",
    )
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, {"plain": plain, "marked": filled(torch.float32, 4), "parameter": loaded["parameter"]})
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        assert bits(loaded["parameter"]) == bits(parameter)


def test_containers_that_are_shared_are_written_apart_but_their_tensors_once() -> None:
    shared = {"w": filled(torch.float32, 100)}
    catalog, store = opened(saved({"a": shared, "b": shared}))
    assert list(catalog.tensors) == ["a.w", "b.w"]
    assert catalog.attrs["aliases"] == {"b.w": "a.w"}
    assert_same(torch.load(io.BytesIO(written(catalog, store))), {"a": shared, "b": shared})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int) -> None:
    value = kinds_of(torch.bfloat16)
    catalog, store = opened(saved(value, pickle_protocol=protocol))
    assert_same(torch.load(io.BytesIO(written(catalog, store))), value)


def repickled(tree: object, *, data: bytes = bytes(64), extra: tuple[tuple[str, bytes], ...] = ()) -> bytes:
    """A zip with one storage ``data/0`` and any pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("a/data.pkl", tree if isinstance(tree, bytes) else dumps(tree))
        made.writestr("a/data/0", data)
        for name, content in extra:
            made.writestr(name, content)
    return stream.getvalue()


def a_tensor(
    shape: object = (2, 3),
    strides: object = (3, 1),
    offset: object = 0,
    *,
    numel: object = 16,
    key: object = "0",
    kind: str = "FloatStorage",
    pid: object = None,
) -> Inert:
    from core.inert import Global, Persistent

    storage = Persistent(pid if pid is not None else ("storage", Global("torch", kind), key, "cpu", numel))
    return Inert("reduce", Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, strides, False, None))


def test_the_hand_made_tensor_is_fine() -> None:
    catalog, store = opened(repickled({"t": a_tensor()}, data=bytes(range(64))))
    assert entry_bytes(catalog, store, "t") == bytes(range(24))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (a_tensor((17,), (1,)), "reaches byte 68 of a storage of 64 bytes"),
        (a_tensor((2, 3), (14, 1)), "reaches byte 68"),
        (a_tensor((2, 3), (3, 1), 11), "reaches byte 68"),
        (a_tensor((1 << 62, 2), (1 << 62, 1)), "reaches byte"),
        (a_tensor((-1,), (1,)), "extent or stride -1"),
        (a_tensor((3,), (-1,), 8), "extent or stride -1"),
        (a_tensor((3,), (1,), -1), "-1"),
        (a_tensor((3.0,), (1,)), "3.0"),
        (a_tensor((True,), (1,)), "True"),
        (a_tensor((1 << 70,), (0,)), "offset, extent"),
        (a_tensor((1, 2), (1,)), "shape"),
        (a_tensor(7, (1,)), "shape"),
        (a_tensor((1,) * 65, (1,) * 65), "65 axes"),
        (a_tensor(numel=17), "64"),
        (a_tensor(numel=-1), "storage is"),
        (a_tensor(numel="16"), "storage is"),
        (a_tensor(key="7"), "record 'data/7', which the zip does not have"),
        (a_tensor(key=7), "storage is"),
        (a_tensor(pid=("module", 1, 2, 3, 4)), "storage is"),
        (a_tensor(pid=5), "storage is"),
        (Inert("reduce", a_tensor().fn, (1,)), "malformed"),
        (Inert("reduce", a_tensor().fn, (1, 2, 3, 4, 5, 6)), "no storage"),
        (Inert("reduce", a_tensor().fn, (None,) * 99), "malformed"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tensor: Inert, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        opened(repickled({"t": tensor}))
    assert caught.value.file == "f.pt"


def test_containers_that_unfold_without_end_are_refused() -> None:
    laughs: object = [1]
    for _ in range(60):
        laughs = [laughs, laughs]
    maps: object = {"t": a_tensor()}
    for _ in range(60):
        maps = {"a": maps, "b": maps}
    circle: list[object] = []
    circle.append(circle)
    deep: object = 1
    for _ in range(400):
        deep = {"a": deep}
    for tree in (laughs, maps, circle, deep):
        with pytest.raises((UnsafeError, CorruptError)):
            opened(repickled({"tree": tree, "t": a_tensor()}))


def test_a_pickle_that_asks_for_code_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    catalog, _ = opened(saved({"t": filled(torch.int8, 3), "evil": Evil()}))
    assert catalog.objects["evil"].value.class_name == "io.open"
    assert not (tmp_path / "ran").exists()


def test_other_kinds_of_files_are_refused_by_name() -> None:
    legacy = saved({"a": filled(torch.int8, 3)}, _use_new_zipfile_serialization=False)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), stream)
    tar = bytes(257) + b"ustar" + bytes(300)
    for data, message in (
        (legacy, "before 1.6"),
        (tar, "before 1.6"),
        (stream.getvalue(), "TorchScript"),
        (pickle.dumps({"a": 1}), "bare pickle"),
        (repickled({}, extra=(("a/byteorder", b"big"),)), "big-endian"),
    ):
        store = MemoryStore({"f.pt": data}, entry="f.pt")
        assert FORMAT.sniff(store)
        with pytest.raises(UnsupportedError, match=message):
            FORMAT.read(store)
    for data in (b"", b"PK", b"hello world", bytes(600)):
        assert not FORMAT.sniff(MemoryStore({"f.pt": data}, entry="f.pt"))


def test_a_directory_is_read_if_it_is_clear_which_file_is_meant() -> None:
    data = saved({"a": filled(torch.int8, 3)})
    for names in (["x.pt"], ["a.bin", "readme.md"], ["x.pt", "checkpoint.pt", "y.pth"]):
        store = MemoryStore(dict.fromkeys(names, data))
        assert FORMAT.sniff(store)
        assert list(FORMAT.read(store).tensors) == ["a"]
    for names in (["x.pt", "y.pt"], ["x.txt"], []):
        store = MemoryStore(dict.fromkeys(names, data))
        assert not FORMAT.sniff(store)
        with pytest.raises(UnsupportedError, match="exactly one"):
            read(store)


GOLDEN_FILES = (
    "hf/llama/torch_single/model_zip.pt",
    "hf/llama/torch_single/nested_zip.pt",
    "hf/llama/torch_single/ordereddict_state_dict.pt",
    "mcore_legacy/dense_gqa/tp4_pp1/iter_0000010/mp_rank_01/model_optim_rng.pt",
)


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_are_read_and_written_bit_for_bit(golden: Path, name: str, tmp_path: Path) -> None:
    path = golden / name
    store = LocalStore(path.parent, entry=path.name)
    catalog = FORMAT.read(store)
    new = written(catalog, store)
    again, memory = opened(new)
    assert to_plain(again.skeleton) == to_plain(catalog.skeleton)
    for key in (*catalog.tensors, *catalog.hidden):
        assert entry_bytes(again, memory, key) == entry_bytes(catalog, store, key)
    for loaded in loads(new, tmp_path / "new.pt"):
        for key in catalog.tensors:
            assert bits(found(loaded, key)) == entry_bytes(catalog, store, key)


def found(tree: Any, key: str) -> Any:
    """The entry of a loaded tree that has a key of ours; tries every way to split it."""
    if not key:
        return tree
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:n]), ".".join(parts[n:])
        if isinstance(tree, dict):
            matches = [k for k in tree if str(k) == name]
        else:
            matches = [int(name)] if isinstance(tree, (list, tuple)) and name.isdigit() else []
        for match in matches:
            below = found(tree[match], rest)
            if below is not None:
                return below
    return None


@pytest.mark.parametrize("name", GOLDEN_FILES[:3])
def test_golden_files_hold_what_torch_loads(golden: Path, name: str) -> None:
    path = golden / name
    store = LocalStore(path.parent, entry=path.name)
    catalog = FORMAT.read(store)
    loaded = torch.load(path, weights_only=True)
    for key, meta in catalog.tensors.items():
        tensor = found(loaded, key)
        assert (f"torch.{meta.dtype}", meta.shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert entry_bytes(catalog, store, key) == bits(tensor)


def test_the_legacy_twin_of_a_golden_file_is_refused_by_name(golden: Path) -> None:
    folder = golden / "hf/llama/torch_single"
    for name in ("model_legacy.pt", "nested_legacy.pt"):
        with pytest.raises(UnsupportedError, match=r"before 1\.6") as caught:
            FORMAT.read(LocalStore(folder, entry=name))
        assert caught.value.file == name


def test_a_rank_file_is_written_again_with_its_objects_in_place(golden: Path) -> None:
    path = golden / GOLDEN_FILES[3]
    store = LocalStore(path.parent)
    tree = parse(store, path.name, prefix="mp_rank_01:", coords=(("tp", 1), ("pp", 0)))
    assert all(key.startswith("mp_rank_01:") for key in (*tree.arrays, *tree.objects))
    assert all(array.coords == (("tp", 1), ("pp", 0)) for array in tree.arrays.values())
    arrays = {**tree.arrays, **tree.hidden}
    plan = plan_tree(tree.value, arrays.__getitem__, prefix="model_optim_rng")
    made = bytearray(plan.size)
    for placed in plan.arrays:
        assert placed.array.extent is not None and placed.array.extent.strides is None
        piece = store.read(path.name, placed.array.extent.offset, placed.array.n_bytes)
        made[placed.offset : placed.offset + len(piece)] = piece
    for offset, piece in plan.literals(lambda name: 0):
        made[offset : offset + len(piece)] = piece
    catalog, memory = opened(bytes(made))
    mapping = as_mapping(catalog.skeleton)
    assert mapping is not None
    assert ASIDE_KEY not in mapping
    assert attributes(mapping["args"]) is not None
    assert to_plain(mapping["args"]) == to_plain(as_mapping(tree.value)["args"])  # type: ignore[index]
    for key in catalog.tensors:
        source = arrays[f"mp_rank_01:{key}"]
        assert entry_bytes(catalog, memory, key) == store.read(path.name, source.extent.offset, source.n_bytes)  # type: ignore[union-attr]


def test_a_planned_zip_can_be_moved_into_a_bigger_file() -> None:
    array = StoredArray("w", "float32", (2, 3))
    plan = plan_tree([TensorLeaf("w"), 5, TensorLeaf("w")], lambda key: array, prefix="archive")
    moved = plan.shifted(1024)
    assert [placed.offset - 1024 for placed in moved.arrays] == [placed.offset for placed in plan.arrays]
    assert len(plan.arrays) == 1
    made = bytearray(1024 + moved.size + 50)
    content = bytes(range(24))
    made[moved.arrays[0].offset :][:24] = b""
    made[moved.arrays[0].offset : moved.arrays[0].offset + 24] = content
    made = made.ljust(1024 + moved.size + 50, b"\0")
    for offset, piece in moved.literals(lambda name: 0):
        made[offset : offset + len(piece)] = piece
    loaded = torch.load(io.BytesIO(bytes(made[1024 : 1024 + plan.size])))
    assert bits(loaded[0]) == content
    assert loaded[0].data_ptr() == loaded[2].data_ptr()
    tree = parse(MemoryStore({"big": bytes(made)}), "big", start=1024, n_bytes=plan.size)
    assert tree.arrays["0"].extent == Extent("big", moved.arrays[0].offset)


def test_a_storage_of_another_file_is_not_written() -> None:
    tree = parse(MemoryStore({"f": saved({"x": bare_storage()})}), "f")
    with pytest.raises(UnsupportedError, match="storage"):
        plan_tree(tree.value, lambda key: StoredArray(key, "int8", (1,)), prefix="a")


def item(value: object, *, before: int = 37) -> tuple[MemoryStore, Extent]:
    data = saved(value)
    return MemoryStore({"i": b"x" * before + data + b"y" * 50}), Extent("i", before, item_bytes=len(data))


def located(value: torch.Tensor, **where: int) -> tuple[MemoryStore, StoredArray]:
    store, extent = item(value, **where)
    return store, item_location(store, StoredArray("t", str(value.dtype)[6:], tuple(value.shape), extent))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_items_are_located_with_their_strides(dtype: torch.dtype) -> None:
    for before, tensor in enumerate(kinds_of(dtype)[name] for name in ("whole", "transposed", "strided", "scalar",
            "columns", "expanded", "channels last", "empty", "empty matrix", "ones")):  # fmt: skip
        for _ in range(2):
            store, array = located(tensor, before=before)
            extent = array.extent
            assert extent is not None and not extent.is_late
            strides = extent.strides or c_strides(array.shape)
            if tensor.numel():
                span = 1 + sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
                raw = bytearray(store.read("i", extent.offset, span * tensor.element_size()))
                view = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).as_strided(array.shape, strides)
                assert bits(view) == bits(tensor)


def test_parameters_and_marked_tensors_are_items_too() -> None:
    marked = filled(torch.float32, 3)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    for tensor in (torch.nn.Parameter(filled(torch.float32, 3)), marked):
        store, array = located(tensor)
        assert store.read("i", array.extent.offset, 12) == bits(tensor)  # type: ignore[union-attr]


def test_an_item_with_a_long_pickle_is_located_by_its_directory() -> None:
    marked = filled(torch.float32, 3)
    marked.note = "x" * 5000  # type: ignore[attr-defined]
    store, array = located(marked)
    assert store.read("i", array.extent.offset, 12) == bits(marked)  # type: ignore[union-attr]


def test_an_item_whose_records_are_in_another_order_is_located() -> None:
    tensor = filled(torch.float32, 3)
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as source:
        content = {name: source.read(name) for name in reversed(source.namelist())}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, data in content.items():
            made.writestr(name, data)
    store = MemoryStore({"i": stream.getvalue()})
    array = item_location(store, StoredArray("t", "float32", (3,), Extent("i", 0, item_bytes=store.size("i"))))
    assert store.read("i", array.extent.offset, 12) == bits(tensor)  # type: ignore[union-attr]


def test_an_array_that_is_not_late_is_returned_as_it_is() -> None:
    array = StoredArray("t", "int8", (3,), Extent("i", 5))
    assert item_location(MemoryStore(), array) is array


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [("float32", (4, 3), "float32 tensor of shape"), ("float32", (12,), "shape"), ("int32", (3, 4), "int32")],
)
def test_an_item_that_is_not_what_the_metadata_says_is_refused(dtype: str, shape: Shape, message: str) -> None:
    store, extent = item(filled(torch.float32, 3, 4))
    with pytest.raises(CorruptError, match=message) as caught:
        item_location(store, StoredArray("layer.weight", dtype, shape, extent))
    assert caught.value.file == "i"
    assert caught.value.key == "layer.weight"
    assert caught.value.span == (37, 37 + extent.item_bytes)  # type: ignore[operator]


def test_an_item_that_is_no_dense_tensor_is_refused() -> None:
    for value, kind in (
        ({"a": 1}, CorruptError),
        (torch.ones(3, dtype=torch.complex64).conj(), UnsupportedError),
        (torch.empty(3, device="meta"), UnsupportedError),
    ):
        store, extent = item(value)
        with pytest.raises(kind):
            item_location(store, StoredArray("t", "complex64", (3,), extent))


def test_a_truncated_item_is_refused_at_every_length() -> None:
    tensor = filled(torch.float32, 30)
    store, extent = item(tensor, before=0)
    data = store.read("i", 0, extent.item_bytes or 0)
    for n in (*range(0, len(data), 7), len(data) - 1):
        short = MemoryStore({"i": data[:n]})
        for stated in (n, len(data)):
            array = StoredArray("t", "float32", (30,), Extent("i", 0, item_bytes=stated))
            with contextlib.suppress(CorruptError):
                where = item_location(short, array).extent
                assert where is not None and where.offset + array.n_bytes <= n


def test_items_are_located_from_many_threads() -> None:
    tensors = [filled(torch.float32, 3 + n % 5, 4, seed=n) for n in range(60)]
    streams = [saved(tensor if n % 3 else tensor.t()) for n, tensor in enumerate(tensors)]
    store = MemoryStore({f"{n}": stream for n, stream in enumerate(streams)})

    def address(n: int) -> Extent | None:
        shape = tuple(tensors[n].shape) if n % 3 else tuple(tensors[n].t().shape)
        late = Extent(f"{n}", 0, item_bytes=len(streams[n]))
        return item_location(store, StoredArray("t", "float32", shape, late)).extent

    expected = [address(n) for n in range(60)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(address, range(60))) == expected
    assert {extent is not None and extent.strides for extent in expected} >= {None, (1, 4)}


def test_a_truncated_item_names_its_file() -> None:
    store, extent = item(filled(torch.float32, 30))
    short = MemoryStore({"i": store.read("i", 0, store.size("i") - 100)})
    with pytest.raises(CorruptError) as caught:
        item_location(short, StoredArray("t", "float32", (31,), extent))
    assert (caught.value.file, caught.value.key) == ("i", "t")


def test_golden_items_are_located(golden: Path) -> None:
    folder = golden / "torch_dcp/fsdp2_dp2"
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    store = LocalStore(folder)
    n = 0
    for index, place in metadata.storage_data.items():
        meta = metadata.state_dict_metadata[index.fqn]
        extent = Extent(place.relative_path, place.offset, item_bytes=place.length)
        tensor = torch.load(io.BytesIO(store.read(extent.file, place.offset, place.length)), weights_only=False)
        if hasattr(meta, "size"):
            shape = next(tuple(chunk.sizes) for chunk in meta.chunks if chunk.offsets == index.offset)
            found = item_location(store, StoredArray("t", str(meta.properties.dtype)[6:], shape, extent)).extent
            assert found is not None and found.strides is None
            assert store.read(extent.file, found.offset, len(bits(tensor))) == bits(tensor)
            n += 1
        else:
            stream = StoredArray("r", "uint8", (place.length,), replace(extent, item_bytes=None))
            value, arrays = load_object(store, stream, key=index.fqn)
            assert arrays == {}
            assert value == tensor or not isinstance(tensor, (int, float, bool))
    assert n > 10


def test_objects_are_loaded_from_their_streams() -> None:
    state = {"cpu": filled(torch.uint8, 20), "list": [1, (2, argparse.Namespace(x=filled(torch.int8, 3)))]}
    for value in (state, [state], 5, None, "text", collections.OrderedDict(a=1)):
        data = saved(value)
        store = MemoryStore({"o": b"z" * 11 + data})
        stream = StoredArray("raw:k", "uint8", (len(data),), Extent("o", 11))
        loaded, arrays = load_object(store, stream, key="rng/shard_0_1")
        assert all(key.startswith("rng/shard_0_1:") for key in arrays)
        if value in (5, None, "text"):
            assert loaded == value
        if value is state:
            assert sorted(array.shape[0] for array in arrays.values()) == [3, 20]
            assert isinstance(loaded, dict)
            leaf = loaded["cpu"]
            assert store.read("o", arrays[leaf.key].extent.offset, 20) == bits(state["cpu"])  # type: ignore[union-attr]


def test_a_bare_pickle_is_loaded_as_an_object() -> None:
    data = pickle.dumps({"a": (1, 2)}, protocol=4)
    stream = StoredArray("r", "uint8", (len(data),), Extent("o", 0))
    loaded, arrays = load_object(MemoryStore({"o": data}), stream, key="k")
    assert loaded == {"a": (1, 2)}
    assert arrays == {}


def test_a_damaged_object_stream_names_the_object() -> None:
    data = saved({"a": 1})
    legacy = saved({"a": 1}, _use_new_zipfile_serialization=False)
    for broken in (data[:-30], b"hello", b"", legacy, data[:40] + data[44:]):
        store = MemoryStore({"o": b"z" * 5 + broken})
        with pytest.raises((CorruptError, UnsupportedError)) as caught:
            load_object(store, StoredArray("r", "uint8", (len(broken),), Extent("o", 5)), key="rng")
        assert caught.value.key == "rng"
        assert caught.value.file == "o"


REAL = saved(
    {"a": filled(torch.float32, 4, 3), "n": argparse.Namespace(lr=1.0), "l": [filled(torch.bfloat16, 5), (1,)]}
)


def attempt(data: bytes) -> None:
    store = MemoryStore({"f.pt": data}, entry="f.pt")
    with contextlib.suppress(CheckpointingException):
        if FORMAT.sniff(store):
            written(FORMAT.read(store), store)


def test_a_file_cut_at_any_byte_is_an_error_of_ours() -> None:
    for n in range(0, len(REAL), 3):
        store = MemoryStore({"f.pt": REAL[:n]}, entry="f.pt")
        if FORMAT.sniff(store):
            with pytest.raises(TruncatedError):
                FORMAT.read(store)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_raises_only_our_errors(damages: list[tuple[int, int]]) -> None:
    data = bytearray(REAL)
    for at, byte in damages:
        data[at] = byte
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt(bytes(data))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3), st.integers(0, 2**32))
def test_a_damaged_pickle_raises_only_our_errors(damages: list[tuple[int, int]], seed: int) -> None:
    with zipfile.ZipFile(io.BytesIO(REAL)) as source:
        pickled = bytearray(source.read("archive/data.pkl"))
    for at, byte in damages:
        pickled[at % len(pickled)] = byte
    if seed % 3 == 0:
        start = random.Random(seed).randrange(len(pickled))
        del pickled[start : start + seed % 7]
    attempt(repickled(bytes(pickled), data=bytes(48), extra=(("a/data/1", bytes(10)),)))
