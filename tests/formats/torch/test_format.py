"""The format ``torch``: what torch.save writes is read, and what is written torch.load reads."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.utils.serialization import config

from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.stored import Extent, PlannedArray
from core.engine.changes.select import select
from core.errors import UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.torch.format import FORMAT, lay_out, parse, read
from core.formats.torch.weights_only import ASIDE_KEY
from core.formats.torch.zip.tree_layout import plan_tree
from core.opening.target import partitioned
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, attributes
from core.pickle.plain import to_plain
from tests.formats.torch.torch_samples import (
    DTYPES,
    assert_same,
    bits,
    entry_bytes,
    filled,
    kinds_of,
    loads,
    opened,
    rewritten,
    saved,
    written,
)
from tests.support import forked


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_read_and_written_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    value = kinds_of(dtype)
    catalog, store = opened(saved(value))
    flat = {
        "nested.list.0": value["nested"]["list"][0],
        "nested.list.1.0": value["nested"]["list"][1][0],
    }
    flat |= {"nested.list.1.1.deep": value["nested"]["list"][1][1]["deep"]}
    flat |= {key: item for key, item in value.items() if key != "nested"}
    assert sorted(catalog.tensors) == sorted(flat)
    for key, tensor in flat.items():
        assert catalog.tensors[key].shape == tuple(tensor.shape)
        assert f"torch.{catalog.tensors[key].dtype}" == str(dtype)
        assert entry_bytes(catalog, store, key) == bits(tensor), key
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_parameters_and_requires_grad_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {
        "parameter": torch.nn.Parameter(filled(dtype, 3, 2)),
        "frozen": torch.nn.Parameter(filled(dtype, 4), requires_grad=False),
        "leaf": filled(dtype, 5).requires_grad_(
            dtype != torch.float8_e4m3fn
        ),  # torch cannot load what it saves
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
    assert catalog.ties == {"head": "embedding"}
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
    assert [placed.array.name for placed in lay_out(target)[0].arrays] == ["b"], (
        "b and c still share"
    )


def test_a_record_that_is_just_the_tensor_lends_its_crc() -> None:
    storage = filled(torch.float32, 12)
    data = saved(
        {"whole": storage.view(3, 4), "part": storage[:6], "turned": storage.view(3, 4).t()}
    )
    catalog, _ = opened(data)
    crcs = {key: catalog.fragments(key)[0].array.extent.crc for key in catalog.tensors}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert crcs == {
            "whole": archive.getinfo("archive/data/0").CRC,
            "part": None,
            "turned": None,
        }
    torch.serialization.set_crc32_options(False)
    try:
        catalog, store = opened(saved({"whole": storage}))
    finally:
        torch.serialization.set_crc32_options(True)
    assert catalog.fragments("whole")[0].array.extent.crc is None
    with zipfile.ZipFile(io.BytesIO(written(catalog, store))) as archive:
        assert archive.testzip() is None


def test_a_written_file_has_right_crcs_and_offsets(tmp_path: Path) -> None:
    value = {
        "a": filled(torch.float32, 9, 9),
        "e": filled(torch.int8, 0),
        "b": filled(torch.float8_e5m2, 7),
    }
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
    done = forked.run(["-c", script, path], env={"TORCH_SERIALIZATION_DEBUG": "1", "PATH": ""})
    assert done.stdout.strip() == "fine", done.stderr


def test_writing_is_a_function_of_the_content() -> None:
    data = saved({"b": filled(torch.float32, 3), "a": [1, {"x": filled(torch.int8, 2)}]})
    once = rewritten(data)
    assert rewritten(data) == once
    assert rewritten(once) == once


def test_plain_values_keep_their_places_and_types(tmp_path: Path) -> None:
    value = {
        "tensor": filled(torch.float32, 2),
        "none": None,
        "yes": True,
        "int": -5,
        "big": 1 << 200,
        "float": 0.1,
        "list": [float("inf")],
        "text": "grün\ud800",
        "bytes": b"\0\xff",
        "array": bytearray(b"abc"),
        "complex": 1 - 2j,
        "set": {1, "a"},
        "empty": {},
        "none in it": [],
        "tuple": (1, (2, [3])),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict([("z", 1), ("a", filled(torch.int8, 3))]),
        5: "five",
        (1, 2): "pair",
        None: "nothing",
        (torch.float32, torch.bfloat16): {"param": filled(torch.int8, 4)},
    }
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


def test_keys_that_join_to_one_name_are_told_apart(tmp_path: Path) -> None:
    value = {
        "a.b": filled(torch.int8, 2),
        "a": {"b": filled(torch.int8, 3), "c": 5},
        "a.c": 6,
        1: filled(torch.int8, 4),
        "1": filled(torch.int8, 5),
        "#0": filled(torch.int8, 6),
        "": filled(torch.int8, 7),
        "n": argparse.Namespace(hidden=filled(torch.int8, 8)),
    }
    data = saved(value)
    catalog, store = opened(data)
    sizes = {key: tensor.shape[0] for key, tensor in catalog.tensors.items()}
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


def test_one_file_of_a_series_says_so() -> None:
    name = "pytorch_model-00002-of-00003.bin"
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2)}, stream)
    catalog = read(MemoryStore({name: stream.getvalue()}, entry=name))
    assert catalog.notes == ("this is file 2 of 3; pass the directory to read all of them",)
    alone = "pytorch_model-00001-of-00001.bin"
    assert not read(MemoryStore({alone: stream.getvalue()}, entry=alone)).notes


def test_a_flat_catalog_becomes_a_dict(tmp_path: Path) -> None:
    catalog, store = opened(saved({"a": {"b": filled(torch.int8, 3)}, "c": 5}))
    for loaded in loads(written(replace(catalog, skeleton=None), store), tmp_path / "new.pt"):
        assert_same(loaded, {"a.b": filled(torch.int8, 3), "c": 5})


def test_object_leaves_are_filled_in() -> None:
    catalog, store = opened(saved({"a": filled(torch.int8, 3), "c": 5}))
    leaved = replace(catalog, skeleton={"a": TensorLeaf("a"), "c": ObjectLeaf("c")})
    assert torch.load(io.BytesIO(written(leaved, store)))["c"] == 5
    unread = replace(leaved, objects={"c": StoredObject("c", raw_key="raw:c")})
    with pytest.raises(UnsupportedError, match="was not loaded"):
        lay_out(unread)


def test_iteration_and_args_are_told() -> None:
    catalog, _ = opened(
        saved({"iteration": 12, "args": argparse.Namespace(lr=1.5), "w": filled(torch.int8, 1)})
    )
    assert catalog.iteration == 12
    assert attributes(catalog.args) == {"lr": 1.5}
    assert catalog.version == "3"


class Subclass(torch.Tensor):
    """A subclass of our own."""


def bare_storage() -> object:
    return filled(torch.int8, 4).untyped_storage()


UNSUPPORTED: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse tensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
        "quantized tensor",
    ),
    "per channel": (
        lambda: torch.quantize_per_channel(
            torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
        ),
        "quantized tensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor"),
    "conj": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "view with the conj bit"),
    "neg": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "view with the neg bit"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "tensor of the class .*Subclass"),
    "expanded": (lambda: torch.ones(1).expand(1 << 40), "view expanded to more than 4 GiB"),
    "parameter": (lambda: torch.nn.Parameter(torch.empty(3, device="meta")), "meta tensor"),
    "storage": (bare_storage, "cannot copy a bare storage"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_handled_is_shown_and_not_copied(name: str) -> None:
    make, kind = UNSUPPORTED[name]
    catalog, store = opened(saved({"fine": filled(torch.int8, 3), "odd": {name: make()}}))
    assert list(catalog.tensors) == ["fine"]
    key = f"odd.{name}"
    assert list(catalog.refused) == [key]
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
    (dropped,) = catalog.dropped
    assert dropped.names == ("marked.partition_dim", "parameter.tensor_model_parallel")
    assert dropped.reason == "Python attributes of tensors" and not catalog.notes
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(
            loaded,
            {"plain": plain, "marked": filled(torch.float32, 4), "parameter": loaded["parameter"]},
        )
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        assert bits(loaded["parameter"]) == bits(parameter)


def test_containers_that_are_shared_are_written_apart_but_their_tensors_once() -> None:
    shared = {"w": filled(torch.float32, 100)}
    catalog, store = opened(saved({"a": shared, "b": shared}))
    assert list(catalog.tensors) == ["a.w", "b.w"]
    assert catalog.ties == {"b.w": "a.w"}
    assert_same(torch.load(io.BytesIO(written(catalog, store))), {"a": shared, "b": shared})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int) -> None:
    value = kinds_of(torch.bfloat16)
    catalog, store = opened(saved(value, pickle_protocol=protocol))
    assert_same(torch.load(io.BytesIO(written(catalog, store))), value)


def tarred(*names: str) -> bytes:
    """A tar file of empty pickles."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(pickle.dumps(None, 2)))
    return file.getvalue()


def test_other_kinds_of_files_are_refused_by_name() -> None:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), stream)
    for data, message in (
        (tarred("sys_info", "pickle", "tensors", "storages"), "tar format of torch 0.1"),
        (stream.getvalue(), "TorchScript"),
        (pickle.dumps({"a": 1}), "bare pickle"),
    ):
        store = MemoryStore({"f.pt": data}, entry="f.pt")
        assert FORMAT.sniff(store)
        with pytest.raises(UnsupportedError, match=message):
            FORMAT.read(store)
    for data in (
        b"",
        b"PK",
        b"hello world",
        bytes(600),
        tarred("notes.txt", "pickle"),
        bytes(257) + b"ustar",
    ):
        assert not FORMAT.sniff(MemoryStore({"f.pt": data}, entry="f.pt"))


def test_of_a_directory_only_the_file_that_is_written_there_is_the_checkpoint() -> None:
    data = saved({"a": filled(torch.int8, 3)})
    store = MemoryStore(dict.fromkeys(["x.pt", "checkpoint.pt", "y.pth"], data))
    assert FORMAT.sniff(store)
    assert list(FORMAT.read(store).tensors) == ["a"]
    for names in (["x.pt"], ["last.ckpt", "readme.md"], ["x.pt", "y.pt"], ["x.txt"], []):
        store = MemoryStore(dict.fromkeys(names, data))
        assert not FORMAT.sniff(store)
        with pytest.raises(UnsupportedError, match=r"does not contain checkpoint\.pt"):
            read(store)


GOLDEN_FILES = (
    "hf/llama/torch_single/model_zip.pt",
    "hf/llama/torch_single/nested_zip.pt",
    "hf/llama/torch_single/ordereddict_state_dict.pt",
    "mcore_legacy/dense_gqa/tp4_pp1/iter_0000010/mp_rank_01/model_optim_rng.pt",
)


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_are_read_and_written_bit_for_bit(
    golden: Path, name: str, tmp_path: Path
) -> None:
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
            assert bits(find_entry(loaded, key)) == entry_bytes(catalog, store, key)


def find_entry(tree: Any, key: str) -> Any:
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
            below = find_entry(tree[match], rest)
            if below is not None:
                return below
    return None


@pytest.mark.parametrize("name", GOLDEN_FILES[:3])
def test_golden_files_hold_what_torch_loads(golden: Path, name: str) -> None:
    path = golden / name
    store = LocalStore(path.parent, entry=path.name)
    catalog = FORMAT.read(store)
    loaded = torch.load(path, weights_only=True)
    assert catalog.tensors
    for key, meta in catalog.tensors.items():
        tensor = find_entry(loaded, key)
        assert (f"torch.{meta.dtype}", meta.shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert entry_bytes(catalog, store, key) == bits(tensor)


def test_a_rank_file_is_written_again_with_its_objects_in_place(golden: Path) -> None:
    path = golden / GOLDEN_FILES[3]
    store = LocalStore(path.parent)
    tree = parse(store, path.name, prefix="mp_rank_01:", coords=(("tp", 1), ("pp", 0)))
    assert all(key.startswith("mp_rank_01:") for key in (*tree.arrays, *tree.objects))
    assert all(array.coords == (("tp", 1), ("pp", 0)) for array in tree.arrays.values())
    arrays = {**tree.arrays, **tree.hidden}
    planned = {
        key: PlannedArray(array.name, array.dtype, array.shape) for key, array in arrays.items()
    }
    plan = plan_tree(tree.value, planned.__getitem__, prefix="model_optim_rng")
    content = bytearray(plan.size)
    for placed in plan.arrays:
        extent = arrays[placed.array.name].extent
        assert extent.strides is None
        piece = store.read(path.name, extent.offset, placed.array.n_bytes)
        content[placed.offset : placed.offset + len(piece)] = piece
    for offset, piece in plan.literals(lambda name: 0):
        content[offset : offset + len(piece)] = piece
    catalog, memory = opened(bytes(content))
    mapping = as_mapping(catalog.skeleton)
    assert mapping is not None
    assert ASIDE_KEY not in mapping
    assert attributes(mapping["args"]) is not None
    assert to_plain(mapping["args"]) == to_plain(as_mapping(tree.value)["args"])  # type: ignore[index]
    for key in catalog.tensors:
        source = arrays[f"mp_rank_01:{key}"]
        assert entry_bytes(catalog, memory, key) == store.read(
            path.name, source.extent.offset, source.n_bytes
        )


def test_a_planned_zip_may_lie_in_a_bigger_file() -> None:
    array = PlannedArray("w", "float32", (2, 3))
    plan = plan_tree([TensorLeaf("w"), 5, TensorLeaf("w")], lambda key: array, prefix="archive")
    assert len(plan.arrays) == 1
    container = bytearray(1024 + plan.size + 50)
    content = bytes(range(24))
    for offset, piece in (*plan.literals(lambda name: 0), (plan.arrays[0].offset, content)):
        container[1024 + offset : 1024 + offset + len(piece)] = piece
    loaded = torch.load(io.BytesIO(bytes(container[1024 : 1024 + plan.size])))
    assert bits(loaded[0]) == content
    assert loaded[0].data_ptr() == loaded[2].data_ptr()
    tree = parse(MemoryStore({"big": bytes(container)}), "big", start=1024, n_bytes=plan.size)
    assert tree.arrays["0"].extent == Extent("big", 1024 + plan.arrays[0].offset)


def test_a_storage_of_another_file_is_not_written() -> None:
    tree = parse(MemoryStore({"f": saved({"x": bare_storage()})}), "f")
    with pytest.raises(UnsupportedError, match="storage"):
        plan_tree(tree.value, lambda key: PlannedArray(key, "int8", (1,)), prefix="a")
