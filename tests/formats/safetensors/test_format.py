"""safetensors files and directories: read against the golden ones, written for the real readers."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file, save_model

from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.facets import WeightFileFacts, WriteOptions
from core.engine.changes.tie import untie
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore, ReadStore
from core.formats.safetensors.format import read, sniff
from core.formats.safetensors.layout import lay_out
from core.formats.torch.side_file import OBJECTS_FILE
from core.opening.target import partitioned, tensors_only
from core.pickle.inert import make_namespace
from core.publish.manifest.of_copy import finish_files
from core.publish.stage.files import StageStore
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes
from tests.support.ties import tied

State = dict[str, torch.Tensor]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def values(key: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose values are a function of key and index."""
    n = torch.Size(shape).numel()
    seed = sum(key.encode()) % 97
    if dtype is torch.bool:
        return (torch.arange(n) + seed).remainder(3).eq(0).reshape(shape)
    width = torch.empty((), dtype=dtype).element_size()
    return (
        torch.arange(n * width, dtype=torch.int64)
        .mul(31)
        .add(seed)
        .to(torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def raw(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().contiguous().reshape(-1)
    return (flat.to(torch.uint8) if flat.dtype is torch.bool else flat.view(torch.uint8)).tolist()


def assert_holds(catalog: Catalog, store: ReadStore, wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(catalog.tensors) == set(wanted)
    for key, tensor in wanted.items():
        meta = catalog.tensors[key]
        assert (f"torch.{meta.dtype}", meta.shape) == (str(tensor.dtype), tuple(tensor.shape)), key
        assert tensor_bytes(catalog, store, key).ravel().tolist() == raw(tensor), key


def assert_equal(actual: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(actual) == set(wanted)
    for key, tensor in wanted.items():
        assert actual[key].dtype is tensor.dtype and actual[key].shape == tensor.shape, key
        assert raw(actual[key]) == raw(tensor), key


def target_of(source: TargetCatalog) -> TargetCatalog:
    return partitioned(source, format="safetensors", by="whole")


def written(source: Catalog, store: ReadStore, folder: Path, **options: Any) -> Path:
    """Return the directory (or file) that the engine makes of a catalog.

    Args:
        options: of ``WriteOptions``.
    """
    target = replace(target_of(source), write=WriteOptions(**options))
    target = tensors_only(target) if target.write.is_file else target
    images = lay_out(target)
    folder.mkdir(parents=True)
    plan = make_plan(source, target, images)
    stage = StageStore(folder, is_durable=False)
    finish_files(plan, execute(plan, store, stage), stage)
    stage.close()
    return folder / images[0].path if target.write.is_file else folder


def saved(
    state: State, path: Path, metadata: dict[str, str] | None = None
) -> tuple[Catalog, LocalStore]:
    """A file that safetensors wrote, read by us."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata)
    store = LocalStore(path.parent, entry=path.name)
    return read(store), store


def all_of(folder: Path) -> State:
    """What safetensors reads from the files of a directory."""
    tensors: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


DTYPES_OF_TORCH = [
    dtype
    for name, row in DTYPES.items()
    if row.safetensors
    not in (None, "F4", "F8_E8M0")  # which safetensors.torch 0.8 writes but does not read
    for dtype in [getattr(torch, name)]
]
MIXED = {
    **{
        f"d.{dtype}".replace("torch.", ""): values(str(dtype), dtype, 3, 5)
        for dtype in DTYPES_OF_TORCH
    },
    "scalar": values("scalar", torch.float32),
    "step": torch.tensor(7),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "größe": values("größe", torch.bfloat16, 3),
    'quoted "\\': values("q", torch.float16, 2),
}


# ---- reading
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("form", ["safetensors_sharded", "safetensors_single"])
def test_golden_hugging_face_directories_are_read(golden: Path, model: str, form: str) -> None:
    folder = golden / "hf" / model / form
    store = LocalStore(folder)
    assert sniff(store)
    catalog = read(store)
    assert_holds(catalog, store, all_of(folder))
    if (golden / "oracle" / "hf" / f"{model}.safetensors").exists():
        oracle = load_file(golden / "oracle" / "hf" / f"{model}.safetensors")
        assert_holds(catalog, store, oracle)
    assert list(catalog.files) == ["config.json", "generation_config.json"]
    assert catalog.attributes == {} and catalog.notes == ()


def test_every_oracle_file_is_read(golden: Path) -> None:
    paths = sorted((golden / "oracle").glob("**/*.safetensors"))
    assert paths
    for path in paths:
        store = LocalStore(path.parent, entry=path.name)
        assert sniff(store)
        assert_holds(read(store), store, load_file(path))


def test_an_index_may_be_pointed_at(golden: Path) -> None:
    folder = golden / "hf" / "llama" / "safetensors_sharded"
    store = LocalStore(folder, entry=INDEX)
    assert sniff(store)
    assert_holds(read(store), store, all_of(folder))


def test_reading_needs_headers_only(tmp_path: Path) -> None:
    _, store = saved({"w": torch.zeros(1 << 16)}, tmp_path / "a.safetensors")
    store.close()

    class Counting(LocalStore):
        n_bytes = 0

        def read(self, name: str, offset: int, n_bytes: int) -> bytes:
            self.n_bytes += n_bytes
            return super().read(name, offset, n_bytes)

    counted = Counting(tmp_path)
    read(counted)
    assert counted.n_bytes < 1000


def test_reading_imports_no_heavy_module(golden: Path, repo_dir: Path) -> None:
    code = """
import sys
from pathlib import Path
from core.formats.safetensors.format import FORMAT
from core.files.store import LocalStore
for name in sys.argv[1:]:
    store = LocalStore(Path(name))
    assert FORMAT.sniff(store) and FORMAT.read(store).tensors
heavy = {"torch", "numpy", "safetensors", "zarr", "tensorstore", "ml_dtypes"}
print(sorted(heavy & set(sys.modules)))
"""
    folders = (
        golden / "hf" / "llama" / "safetensors_sharded",
        golden / "torch_dcp" / "hf_storage_dp2",
    )
    run = [sys.executable, "-c", code, *map(str, folders)]
    assert (
        subprocess.run(run, cwd=repo_dir, check=True, capture_output=True, text=True).stdout
        == "[]\n"
    )


def test_a_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    data = save({"w": torch.zeros(2)})
    assert sniff(MemoryStore({"x.safetensors": b""}, entry="x.safetensors"))
    assert sniff(MemoryStore({"blob": data}, entry="blob"))
    assert not sniff(MemoryStore({"blob": b"PK\x03\x04"}, entry="blob"))
    assert not sniff(MemoryStore({"x.bin": data}))
    assert sniff(MemoryStore({INDEX: b""}))
    assert sniff(MemoryStore({"sharded/shard-00001-model-00001-of-00001.safetensors": b""}))
    assert not sniff(MemoryStore({"sharded/other.safetensors": b""}))


def test_aliases_that_safetensors_recorded_are_tensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "model.safetensors"), {"note": "x"})
    store = LocalStore(tmp_path)
    catalog = read(store)
    assert_holds(catalog, store, {"0.weight": model[0].weight, "1.weight": model[0].weight})
    assert next(iter(catalog.ties.values())) in ("0.weight", "1.weight")
    assert catalog.attributes == {"": {"note": "x"}}


def test_a_tensor_called_as_a_format_is_no_alias(tmp_path: Path) -> None:
    catalog, _ = saved({"pt": torch.zeros(2)}, tmp_path / "a.safetensors", {"format": "pt"})
    assert catalog.ties == {} and list(catalog.tensors) == ["pt"]


# ---- directories that contradict themselves
# -----------------------------------------------------------------------


def file_bytes(**tensors: torch.Tensor) -> bytes:
    return save(tensors)


A, B = file_bytes(a=torch.arange(3.0)), file_bytes(b=torch.arange(4.0), c=torch.zeros(1))
SHARDED = {
    "model-00001-of-00002.safetensors": A,
    "model-00002-of-00002.safetensors": B,
}


def index_of(weight_map: object, **metadata: object) -> bytes:
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


WEIGHT_MAP = {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00002-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors",
}


def without(key: str) -> dict[str, str]:
    return {name: file for name, file in WEIGHT_MAP.items() if name != key}


BROKEN: dict[str, tuple[dict[str, bytes], type[CheckpointingException], str, str | None]] = {
    "nothing": ({"config.json": b"{}"}, MissingShardError, "has no safetensors files", None),
    "a file that is not there": (
        {INDEX: index_of(WEIGHT_MAP), "model-00001-of-00002.safetensors": A},
        MissingShardError,
        "model.safetensors.index.json lists this file, but it is missing",
        "b",
    ),
    "a tensor that is not there": (
        {**SHARDED, INDEX: index_of({**WEIGHT_MAP, "x": "model-00001-of-00002.safetensors"})},
        MissingShardError,
        "but it is missing there",
        "x",
    ),
    "a tensor that is not listed": (
        {**SHARDED, INDEX: index_of(without("c"))},
        CorruptError,
        "does not list",
        "c",
    ),
    "a tensor in another file": (
        {
            **SHARDED,
            "model-00001-of-00002.safetensors": file_bytes(a=torch.zeros(3), c=torch.zeros(1)),
            INDEX: index_of(WEIGHT_MAP),
        },
        CorruptError,
        "lists the tensor in model-00002",
        "c",
    ),
    "no weight_map": ({**SHARDED, INDEX: b"{}"}, CorruptError, "no weight_map", None),
    "an empty weight_map": ({**SHARDED, INDEX: index_of({})}, CorruptError, "no weight_map", None),
    "a weight_map of lists": (
        {**SHARDED, INDEX: index_of({"a": []})},
        UnsafeError,
        "not a path",
        None,
    ),
    "an index that is no JSON": ({**SHARDED, INDEX: b"{"}, CorruptError, "is not valid JSON", None),
    "an index that is a list": (
        {**SHARDED, INDEX: b"[]"},
        CorruptError,
        "top level of the JSON file is not an object",
        None,
    ),
    "a file outside": (
        {**SHARDED, INDEX: index_of({"a": "../x.safetensors"})},
        UnsafeError,
        "not a path",
        None,
    ),
    "a file of another kind": (
        {**SHARDED, INDEX: index_of({"a": "x.bin"})},
        CorruptError,
        "not a safetensors",
        "a",
    ),
    "a shard of a series that is not there": (
        {"model-00001-of-00002.safetensors": A},
        MissingShardError,
        "only 1 of 2 shards are present",
        None,
    ),
    "a shard of a series that begins at 0": (
        {"model-00000-of-00003.safetensors": A, "model-00002-of-00003.safetensors": B},
        MissingShardError,
        "only 2 of 3 shards are present",
        None,
    ),
    "a tensor in two files": (
        {"x.safetensors": A, "y.safetensors": A},
        CorruptError,
        "also in x.safetensors",
        "a",
    ),
    "two indexes": (
        {
            "x.safetensors.index.json": index_of({"a": "x"}),
            "y.safetensors.index.json": index_of({"a": "x"}),
        },
        UnsupportedError,
        "has 2 index files",
        None,
    ),
    "a file that is cut": (
        {"model.safetensors": A[:-1]},
        CorruptError,
        "the tensor ends at byte",
        "a",
    ),
    "an index of no length": (
        {"model.safetensors": b""},
        CorruptError,
        "header length alone",
        None,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_directory_that_contradicts_itself_is_refused(case: str) -> None:
    files, kind, message, key = BROKEN[case]
    with pytest.raises(CheckpointingException) as caught:
        read(MemoryStore(dict(files)))
    assert isinstance(caught.value, kind) and message in caught.value.message
    assert caught.value.key == key and caught.value.file is not None


NOTED: dict[str, tuple[dict[str, bytes], list[str], str]] = {
    "a wrong total_size": (
        {**SHARDED, INDEX: index_of(WEIGHT_MAP, total_size=99)},
        ["a", "b", "c"],
        f"total_size in {INDEX} is 99",
    ),
    "an index with names below ./": (
        {
            **SHARDED,
            INDEX: index_of({key: f"./{name}" for key, name in WEIGHT_MAP.items()}),
            "old.safetensors": A,
        },
        ["a", "b", "c"],
        "does not list them: old.safetensors",
    ),
    "a file beside the index": (
        {**SHARDED, INDEX: index_of(WEIGHT_MAP), "old.safetensors": A},
        ["a", "b", "c"],
        "does not list them: old.safetensors",
    ),
    "a single file beside the index": (
        {**SHARDED, INDEX: index_of(WEIGHT_MAP), "model.safetensors": A},
        ["a", "b", "c"],
        "instead of the shards; to read model.safetensors, pass that file itself",
    ),
    "files without an index": (dict(SHARDED), ["a", "b", "c"], "2 files without an index"),
    "a second index": (
        {**SHARDED, INDEX: index_of(WEIGHT_MAP), "ema.safetensors.index.json": b"no"},
        ["a", "b", "c"],
        f"{INDEX} was read, not ema.safetensors.index.json",
    ),
    "an adapter beside the model": (
        {"adapter_model.safetensors": A, "model.safetensors": save({"w": torch.ones(1)})},
        ["w"],
        "because loaders read only model.safetensors: adapter_model.safetensors",
    ),
    "an adapter beside the model's shards": (
        {**SHARDED, "adapter_model.safetensors": A},
        ["a", "b", "c"],
        ("because loaders read only model-00001-of-00002.safetensors …: adapter_model.safetensors"),
    ),
    "all weights in one file beside the index of lost shards": (
        {INDEX: index_of(WEIGHT_MAP), "model-00001-of-00002.safetensors": A, SINGLE: A},
        ["a"],
        f"{SINGLE} was read, as transformers does, because {INDEX} lists files that are missing",
    ),
    "the same weights under another name": (
        {"consolidated.safetensors": A, "model.safetensors": A},
        ["a"],
        "because loaders read only model.safetensors: consolidated.safetensors",
    ),
    "the index of an adapter beside the model": (
        {
            "model.safetensors": save({"w": torch.ones(1)}),
            "adapter_model-00001-of-00001.safetensors": A,
            "adapter_model.safetensors.index.json": b"no",
        },
        ["w"],
        "these files were not read: adapter_model.safetensors.index.json",
    ),
    "metadata that differ": (
        {
            "x.safetensors": save({"a": torch.ones(1)}, {"k": "1"}),
            "y.safetensors": save({"b": torch.ones(1)}, {"k": "2"}),
        },
        ["a", "b"],
        "the files have different metadata 'k'",
    ),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_is_odd_but_clear_is_read_with_a_note(case: str) -> None:
    files, keys, note = NOTED[case]
    catalog = read(MemoryStore(dict(files)))
    assert sorted(catalog.tensors) == keys
    assert any(note in text for text in catalog.notes)


def test_a_right_total_size_is_no_note_even_as_a_fraction() -> None:
    catalog = read(MemoryStore({**SHARDED, INDEX: index_of(WEIGHT_MAP, total_size=32.0)}))
    assert catalog.notes == ()


def test_one_file_of_a_series_says_so() -> None:
    name = "model-00001-of-00002.safetensors"
    catalog = read(MemoryStore({**SHARDED, OBJECTS_FILE: b"x"}, entry=name))
    assert list(catalog.tensors) == ["a"]
    notes = " ".join(catalog.notes)
    assert "file 1 of 2" in notes and OBJECTS_FILE in notes


# ---- writing
# --------------------------------------------------------------------------------------------------


def test_a_written_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    source, store = saved(MIXED, tmp_path / "in.safetensors", {"format": "pt"})
    path = written(source, store, tmp_path / "out", is_file=True)
    assert path.name == "model.safetensors"
    assert path.read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    assert_equal(load_file(path), MIXED)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e8m0fnu"])
def test_dtypes_that_safetensors_reads_as_bytes_only_are_written_and_read(
    tmp_path: Path, dtype: str
) -> None:
    flat = torch.arange(12, dtype=torch.uint8)
    save_file({"w": flat.view(getattr(torch, dtype)).reshape(3, 4)}, tmp_path / "in.safetensors")
    store = LocalStore(tmp_path, entry="in.safetensors")
    source = read(store)
    assert (source.tensors["w"].dtype, source.tensors["w"].shape) == (dtype, (3, 4))
    path = written(source, store, tmp_path / "out", is_file=True)
    with safe_open(path, "np") as opened:
        assert opened.get_slice("w").get_shape() == (
            [3, 8] if dtype.startswith("float4") else [3, 4]
        )
    assert tensor_bytes(source, store, "w").ravel().tolist() == list(range(12))
    data = path.read_bytes()
    assert data[8 + struct.unpack("<Q", data[:8])[0] :] == bytes(range(12))


@pytest.mark.parametrize("name", ["sharded", "single"])
def test_a_golden_directory_comes_out_as_it_was(golden: Path, tmp_path: Path, name: str) -> None:
    folder = golden / "hf" / "llama" / f"safetensors_{name}"
    store = LocalStore(folder)
    out = written(
        read(store),
        store,
        tmp_path / "out",
        max_file_bytes=30_000 if name == "sharded" else 1 << 30,
    )
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        if path.name != INDEX:
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    if name == "sharded":
        ours, real = (json.loads((place / INDEX).read_text()) for place in (out, folder))
        assert ours["weight_map"] == real["weight_map"]
        assert ours["metadata"]["total_size"] == real["metadata"]["total_size"]


def test_shards_hold_at_most_what_was_asked_or_one_tensor(tmp_path: Path) -> None:
    state = {f"t{n}": values(str(n), torch.float32, n) for n in (3, 5, 1, 9, 2, 4)}
    source, store = saved(state, tmp_path / "in.safetensors")
    out = written(source, store, tmp_path / "out", max_file_bytes=24)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_size": 96} and list(index["weight_map"]) == sorted(state)
    sizes: dict[str, list[int]] = {}
    for key, name in index["weight_map"].items():
        sizes.setdefault(name, []).append(state[key].nbytes)
        assert key in load_file(out / name)
    assert all(sum(shard) <= 24 or len(shard) == 1 for shard in sizes.values())
    names = [f"model-{n:05d}-of-{len(sizes):05d}.safetensors" for n in range(1, len(sizes) + 1)]
    assert sorted(sizes) == names and len(names) > 2
    again = LocalStore(out)
    assert_holds(read(again), again, state)
    assert read(again).notes == ()


def test_files_without_tensors_are_written_and_read(tmp_path: Path) -> None:
    out = written(Catalog("fake", None, {}), MemoryStore(), tmp_path / "out")
    assert load_file(out / "model.safetensors") == {} and read(LocalStore(out)).tensors == {}


def test_metadata_of_the_source_are_kept_and_format_is_added(tmp_path: Path) -> None:
    source, store = saved(
        {"w": torch.ones(2)}, tmp_path / "in.safetensors", {"author": "é", "step": "3"}
    )
    out = written(source, store, tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"author": "é", "step": "3", "format": "pt"}


def test_another_format_in_the_metadata_is_kept(tmp_path: Path) -> None:
    source, store = saved({"w": torch.ones(2)}, tmp_path / "in.safetensors", {"format": "mlx"})
    with safe_open(written(source, store, tmp_path / "out") / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "mlx"}


@pytest.mark.parametrize("limit", [1 << 30, 50])
def test_an_alias_is_written_once_and_recorded(tmp_path: Path, limit: int) -> None:
    state = {
        "embed.weight": values("e", torch.bfloat16, 4, 3),
        "norm": values("n", torch.float32, 10),
    }
    source, store = saved(
        {**state, "lm_head.weight": state["embed.weight"].clone()}, tmp_path / "in.safetensors"
    )
    source = tied(source, {"lm_head.weight": "embed.weight"})
    out = written(source, store, tmp_path / "out", max_file_bytes=limit)
    assert_equal(all_of(out), state)
    again = LocalStore(out)
    catalog = read(again)
    assert catalog.ties == {"lm_head.weight": "embed.weight"}
    assert_holds(catalog, again, {**state, "lm_head.weight": state["embed.weight"]})


def test_a_tie_that_the_metadata_cannot_record_has_to_be_undone(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "format": torch.ones(2)}
    source, store = saved(state, tmp_path / "in.safetensors")
    source = tied(source, {"format": "a"})
    with pytest.raises(UnsupportedError) as caught:
        written(source, store, tmp_path / "out")
    assert caught.value.key == "format" and "--untie format=a" in (caught.value.hint or "")
    out = written(untie(source, [("format", "a")]), store, tmp_path / "out")
    assert_equal(all_of(out), state)


def test_a_model_that_safetensors_saved_with_shared_weights_loads_again(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    def model() -> torch.nn.Module:
        layers = torch.nn.Sequential(
            torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        )
        layers[1].weight = layers[0].weight
        return layers

    first, second = model(), model()
    save_model(first, str(tmp_path / "in.safetensors"))
    store = LocalStore(tmp_path, entry="in.safetensors")
    out = written(read(store), store, tmp_path / "out")
    assert load_model(second, str(out / "model.safetensors")) == (set(), [])
    assert torch.equal(first[0].weight, second[1].weight)  # type: ignore[index]


@pytest.mark.parametrize("stem", ["adapter_model", "diffusion_pytorch_model", "consolidated"])
def test_names_that_other_tools_look_for_are_kept(tmp_path: Path, stem: str) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / f"{stem}.safetensors")
    store = LocalStore(tmp_path)
    base = "model" if stem == "consolidated" else stem
    single = written(read(store), store, tmp_path / "one")
    assert [path.name for path in single.iterdir()] == [f"{base}.safetensors"]
    two = written(read(store), store, tmp_path / "two", max_file_bytes=16)
    assert sorted(path.name for path in two.iterdir()) == [
        f"{base}-00001-of-00002.safetensors",
        f"{base}-00002-of-00002.safetensors",
        f"{base}.safetensors.index.json",
    ]
    assert facet_of(read(LocalStore(two)), WeightFileFacts).stem == base


def test_a_dtype_that_the_format_lacks_is_refused_by_the_tensors_name() -> None:
    store = MemoryStore({"x.safetensors": A})
    source = read(store)
    odd = Catalog("fake", None, {"z": replace(source.tensors["a"], dtype="complex128")})
    with pytest.raises(UnsupportedError, match="does not support dtype complex128") as caught:
        lay_out(target_of(odd))
    assert caught.value.key == "z" and "--to" in str(caught.value.hint)


# ---- what lies around the tensors
# ---------------------------------------------------------------------------------


def with_settings(source: Catalog) -> Catalog:
    objects = {
        "args": StoredObject("args", value=make_namespace({"lr": 0.1})),
        "step": StoredObject("step", value=7),
    }
    return replace(source, objects=objects)


def test_a_directory_keeps_objects_and_small_files(golden: Path, tmp_path: Path) -> None:
    folder = golden / "hf" / "llama" / "safetensors_single"
    store = LocalStore(folder)
    source = with_settings(read(store))
    small_files = {"generation_config.json": b"{}", "NOTICE": b"hello"}
    source = replace(source, files={**source.files, **small_files})
    out = written(source, store, tmp_path / "out")
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (out / "generation_config.json").read_bytes() == b"{}" and (
        out / "NOTICE"
    ).read_bytes() == b"hello"
    assert torch.load(out / OBJECTS_FILE, weights_only=True)["objects"] == {"step": 7}
    again = LocalStore(out)
    back = read(again)
    assert list(back.objects) == ["args", "step"] and back.skeleton is None
    assert_holds(back, again, load_file(folder / "model.safetensors"))


def test_a_single_file_holds_nothing_but_tensors(golden: Path, tmp_path: Path) -> None:
    store = LocalStore(golden / "hf" / "llama" / "safetensors_single")
    source = with_settings(read(store))
    path = written(source, store, tmp_path / "out", is_file=True, max_file_bytes=1000)
    assert [child.name for child in path.parent.iterdir()] == ["model.safetensors"]
    assert_equal(load_file(path), load_file(store.path("model.safetensors")))


def test_two_files_of_one_name_are_refused(golden: Path) -> None:
    store = LocalStore(golden / "hf" / "llama" / "safetensors_single")
    source = replace(read(store), files={"model.safetensors": b""})
    with pytest.raises(UnsupportedError, match="same name") as caught:
        lay_out(target_of(source))
    assert caught.value.file == "model.safetensors"


def test_nesting_and_optimizer_of_a_torch_file_survive_a_directory(tmp_path: Path) -> None:
    from core.formats.torch.format import FORMAT as TORCH
    from core.opening.objects import inlined

    state = {
        "model": {"w": values("w", torch.bfloat16, 3, 4), "b": values("b", torch.float32, 3)},
        "optimizer": {
            "state": {0: {"exp_avg": values("m", torch.float32, 3, 4), "step": torch.tensor(3.0)}}
        },
        "groups": [{"lr": 0.1, "params": [0]}],
        "epoch": 5,
    }
    torch.save(state, tmp_path / "in.pt")
    store = LocalStore(tmp_path, entry="in.pt")
    out = written(inlined(TORCH.read(store)), store, tmp_path / "out")
    assert set(all_of(out)) == {
        "model.w",
        "model.b",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.step",
    }
    again = LocalStore(out)
    back = inlined(read(again))
    target = partitioned(back, format="torch", by="whole")
    assert TORCH.lay_out is not None
    images = TORCH.lay_out(target)
    plan = make_plan(back, target, images)
    memory = MemoryStore()
    for image in images:
        memory.create(image.path, image.size)
    finish_files(plan, execute(plan, again, memory), memory)
    value: Any = torch.load(io.BytesIO(bytes(memory.contents["checkpoint.pt"])), weights_only=True)
    assert list(value) == list(state) and value["groups"] == state["groups"] and value["epoch"] == 5
    assert torch.equal(value["model"]["w"].view(torch.int16), state["model"]["w"].view(torch.int16))  # type: ignore[index, call-overload]
    assert value["optimizer"]["state"][0]["step"] == 3


# ---- the real readers, and the contract
# ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", [30_000, 1 << 30])
@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_written_directory(
    golden: Path, tmp_path: Path, model: str, limit: int
) -> None:
    from transformers import AutoModelForCausalLM

    folder = golden / "hf" / model / "safetensors_sharded"
    store = LocalStore(folder)
    out = written(read(store), store, tmp_path / "out", max_file_bytes=limit)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (out, folder)
    )
    assert_equal(ours, theirs)
    assert_equal({key: ours[key] for key in all_of(folder)}, all_of(folder))
