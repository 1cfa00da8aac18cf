"""Directories with a sharded pytorch_model.bin, or a single one and the files of Hugging Face
beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import WeightFileFacts
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.huggingface.bin_format import FORMAT, read, sniff
from core.formats.torch import format as torch_file
from core.opening.objects import apply_object_policy
from core.opening.open import open_checkpoint
from core.opening.target import source_and_target
from core.pickle.inert import TensorLeaf
from tests.formats.torch.torch_samples import (
    a_tensor,
    as_legacy,
    assert_same,
    bits,
    deflated,
    entry_bytes,
    filled,
    repickled,
    saved,
)
from tests.support.facets import facet_of
from tests.support.materialize import materialized
from tests.support.rounds import rounds

INDEX = "pytorch_model.bin.index.json"


def shard(number: int, total: int = 2, stem: str = "pytorch_model") -> str:
    return f"{stem}-{number:05d}-of-{total:05d}.bin"


def directory(
    *shards: Mapping[str, object],
    weight_map: Mapping[str, object] | None = None,
    index: object = None,
    beside: Mapping[str, bytes] | None = None,
) -> MemoryStore:
    """A directory of shards; the index lists what is in them, unless another one is given."""
    total = len(shards)
    if weight_map is None:
        weight_map = {
            key: shard(n + 1, total) for n, content in enumerate(shards) for key in content
        }
    files = {shard(n + 1, total): saved(content) for n, content in enumerate(shards)}
    files[INDEX] = json.dumps(
        {"metadata": {}, "weight_map": weight_map} if index is None else index
    ).encode()
    return MemoryStore({**files, **(beside or {})})


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        {
            "a.weight": filled(torch.float32, 4, 3),
            "b": filled(torch.bfloat16, 5).requires_grad_(False),
        },
        {"c": filled(torch.int64, 2), "a.bias": filled(torch.float32, 4)},
    )


def contents(catalog: Catalog, store: MemoryStore | LocalStore) -> dict[str, bytes]:
    return {key: entry_bytes(catalog, store, key) for key in catalog.tensors}


def as_torch_file(catalog: Catalog, store: MemoryStore | LocalStore) -> Any:
    """What torch loads when the catalog is written as one torch file."""
    source, target = source_and_target(
        apply_object_policy(catalog, keeps_unknown=True, drop_unknown=False), torch_file.FORMAT
    )
    images = torch_file.lay_out(target)
    (data,) = materialized(images, target=target, source=source, store=store).values()
    return torch.load(io.BytesIO(data))


@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "deflated"])
def test_golden_shards_hold_what_torch_loads(
    golden: Path, model: str, kind: str, tmp_path: Path
) -> None:
    folder = golden / "hf" / model / "bin_sharded"
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.bin")):
        loaded |= torch.load(path, weights_only=True)
    if kind != "zip":
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
        for path in folder.glob("*.bin"):
            path.write_bytes((as_legacy if kind == "legacy" else deflated)(path.read_bytes()))
    store = LocalStore(folder)
    assert sniff(store)
    catalog = read(store)
    assert list(catalog.tensors) == list(loaded)
    for key, tensor in loaded.items():
        meta = catalog.tensors[key]
        assert (f"torch.{meta.dtype}", meta.shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert entry_bytes(catalog, store, key) == bits(tensor), key
    assert catalog.ties == (
        {"lm_head.weight": "model.embed_tokens.weight"} if "tied" in model else {}
    )
    assert catalog.notes == ()
    assert facet_of(catalog, WeightFileFacts).stem == "model"
    assert list(catalog.files) == ["config.json"]
    assert entry_bytes(catalog, store, "file:config.json") == (folder / "config.json").read_bytes()
    assert_same(as_torch_file(catalog, store), loaded)


def test_shards_hold_the_weights_of_the_single_file(golden: Path) -> None:
    folder = golden / "hf/llama"
    stores = (
        LocalStore(folder / "bin_sharded"),
        LocalStore(folder / "torch_single", entry="model_zip.pt"),
    )
    shards, single = read(stores[0]), torch_file.read(stores[1])
    assert shards.tensors == {key: single.tensors[key] for key in shards.tensors}
    assert set(shards.tensors) == set(single.tensors)
    assert contents(shards, stores[0]) == contents(single, stores[1])


def test_parameters_stay_parameters() -> None:
    first = {
        "w": torch.nn.Parameter(filled(torch.float32, 3)),
        "v": filled(torch.float32, 2).requires_grad_(),
    }
    store = directory(first, {"x": filled(torch.int8, 3)})
    catalog = read(store)
    assert catalog.skeleton == {
        "w": TensorLeaf("w", "parameter", True),
        "v": TensorLeaf("v", None, True),
        "x": TensorLeaf("x"),
    }
    assert_same(as_torch_file(catalog, store), {**first, "x": filled(torch.int8, 3)})


def test_tensors_that_share_their_bytes_in_a_shard_still_do() -> None:
    weight = filled(torch.float32, 6, 5)
    store = directory(
        {"x": filled(torch.int8, 3)}, {"embed": weight, "head": weight, "t": weight.t()}
    )
    catalog = read(store)
    assert catalog.ties == {"head": "embed"}
    loaded = as_torch_file(catalog, store)
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
    assert bits(loaded["t"]) == bits(weight.t())


def test_values_that_are_no_tensors_are_objects() -> None:
    first, second = tensors()
    store = directory(
        {
            **first,
            "extra": argparse.Namespace(state=filled(torch.int8, 3)),
            "settings": {"lr": 0.5, "n": [1, 2]},
        },
        {**second, "more": argparse.Namespace(state=filled(torch.int8, 4)), "none": None},
        weight_map={
            **dict.fromkeys(first, shard(1)),
            **dict.fromkeys(second, shard(2)),
            "none": shard(2),
        },
    )
    catalog = read(store)
    assert list(catalog.objects) == ["extra", "settings.lr", "settings.n", "more", "none"]
    assert sorted(tensor.shape for tensor in catalog.hidden.values()) == [(3,), (4,)]
    for key, tensor in catalog.hidden.items():
        assert entry_bytes(catalog, store, key) == bits(filled(torch.int8, *tensor.shape))
    loaded = as_torch_file(catalog, store)
    assert loaded["settings"] == {"lr": 0.5, "n": [1, 2]}
    assert loaded["none"] is None
    assert list(catalog.tensors) == [*first, *second]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_shown_and_not_copied() -> None:
    first, second = tensors()
    odd = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    catalog = read(directory({**first, "odd": odd}, second))
    assert catalog.refused == {"odd": "quantized tensor"}
    with pytest.raises(UnsupportedError, match="quantized"):
        torch_file.lay_out(source_and_target(catalog, torch_file.FORMAT)[1])


def test_a_complete_series_without_an_index_is_read_with_a_note() -> None:
    first, second = tensors()
    store = directory(first, second)
    del store.contents[INDEX]
    assert sniff(store)
    catalog = read(store)
    assert list(catalog.tensors) == [*first, *second]
    assert catalog.notes == ("there is no index, but all numbered shards are present",)
    del store.contents[shard(1)]
    with pytest.raises(MissingShardError, match="only 1 of 2 shards are present") as caught:
        read(store)
    assert caught.value.file == shard(1)


def test_two_series_without_an_index_are_refused() -> None:
    store = directory(*tensors())
    del store.contents[INDEX]
    store.contents[shard(1, 3)] = store.contents[shard(1)]
    with pytest.raises(UnsupportedError, match="but no index"):
        read(store)


def test_other_torch_files_and_another_total_size_are_noted() -> None:
    first, second = tensors()
    store = directory(
        first,
        second,
        index={
            "metadata": {"total_size": 91.0},
            "weight_map": {**dict.fromkeys(first, shard(1)), **dict.fromkeys(second, shard(2))},
        },
        beside={"training_args.bin": b"x", "optimizer.pt": b"x", "README.md": b"# a model"},
    )
    catalog = read(store)
    n_bytes = sum(tensor.n_bytes for tensor in catalog.tensors.values())
    assert catalog.notes == (
        f"the tensors add up to {n_bytes} bytes, but total_size in {INDEX} is 91",
        "these files were not read: optimizer.pt, training_args.bin",
    )
    assert list(catalog.files) == ["README.md"]


def test_a_single_file_beside_the_shards_is_noted_as_what_transformers_loads() -> None:
    first, second = tensors()
    index = {"weight_map": {**dict.fromkeys(first, shard(1)), **dict.fromkeys(second, shard(2))}}
    catalog = read(directory(first, second, index=index, beside={"pytorch_model.bin": b"x"}))
    (note,) = catalog.notes
    assert note == (
        f"pytorch_model.bin was not read, because {INDEX} does not list it, but transformers loads "
        "it "
        "instead of the shards; to read pytorch_model.bin, pass that file itself"
    )


def test_both_ways_to_count_shared_tensors_are_right() -> None:
    weight = filled(torch.float32, 6, 5)
    for total in (120, 240):
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(("a", "b"), shard(1, 1)),
        }
        assert read(directory({"a": weight, "b": weight}, index=index)).notes == ()


FIRST, SECOND = tensors()
PLACES: dict[str, object] = {**dict.fromkeys(FIRST, shard(1)), **dict.fromkeys(SECOND, shard(2))}


def without(places: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: place for key, place in places.items() if key != name}


def broken() -> dict[str, tuple[MemoryStore, type[Exception], str]]:
    def indexed(index: object) -> MemoryStore:
        store = directory(FIRST, SECOND)
        store.contents[INDEX] = bytearray(
            index if isinstance(index, bytes) else json.dumps(index).encode()
        )
        return store

    lost = directory(FIRST, SECOND)
    del lost.contents[shard(2)]
    cut = directory(FIRST, SECOND)
    del cut.contents[shard(2)][-100:]
    twice = directory(FIRST, {**SECOND, "b": filled(torch.int8, 3)}, weight_map=PLACES)
    nested = directory(
        FIRST, {"model": SECOND}, weight_map={**dict.fromkeys(FIRST, shard(1)), "model.c": shard(2)}
    )
    numbered: MemoryStore = directory(
        FIRST, {1: filled(torch.int8, 3)}, weight_map={**PLACES, "1": shard(2)}
    )  # type: ignore[dict-item]
    listed = directory(FIRST, SECOND)
    listed.contents[shard(2)] = bytearray(saved([filled(torch.int8, 3)]))
    both = directory(FIRST, SECOND)
    both.contents["other.bin.index.json"] = both.contents[INDEX]
    objects = directory({**FIRST, "n": 1}, {**SECOND, "n": 2}, weight_map=PLACES)
    elsewhere = directory({**FIRST, "n": 1}, SECOND, weight_map={**PLACES, "n": shard(2)})
    joined = directory(
        {**FIRST, "x": {"y": 1}},
        {**SECOND, "x.y": filled(torch.int8, 3)},
        weight_map={**PLACES, "x.y": shard(2)},
    )
    outside = directory(FIRST, SECOND)
    outside.contents[shard(2)] = bytearray(repickled({"c": a_tensor((17,), (1,))}))
    return {
        "a missing shard": (lost, MissingShardError, "a shard listed in"),
        "a short shard": (cut, CorruptError, "cut short|end record"),
        "a tensor that is not there": (
            directory(FIRST, without(SECOND, "c"), weight_map=PLACES),  # type: ignore[arg-type]
            MissingShardError,
            "lists the tensor in this shard, but it is missing there",
        ),
        "a tensor that is not listed": (
            directory(FIRST, SECOND, weight_map=without(PLACES, "c")),
            CorruptError,
            "does not list the tensor",
        ),
        "a tensor in another shard than listed": (
            directory(FIRST, SECOND, weight_map={**PLACES, "c": shard(1)}),
            CorruptError,
            "lists the entry in",
        ),
        "a tensor in two shards": (twice, CorruptError, "also in pytorch_model-00001"),
        "a value in two shards": (objects, CorruptError, "also in"),
        "a value in another shard than listed": (elsewhere, CorruptError, "lists the entry in"),
        "two entries of one key": (joined, CorruptError, "two entries have the same key"),
        "nested tensors": (nested, UnsupportedError, "contains nested tensors"),
        "a name that is a number": (numbered, UnsupportedError, "with an invalid name"),
        "a list of tensors": (listed, UnsupportedError, "does not contain a dict of tensors"),
        "a tensor outside its storage": (outside, CorruptError, "its storage is only"),
        "two indexes": (both, UnsupportedError, "2 index files"),
        "no JSON": (indexed(b"{"), CorruptError, "JSON"),
        "no object": (indexed([1]), CorruptError, "top level of the JSON file is not an object"),
        "no weight_map": (indexed({"metadata": {}}), CorruptError, "no weight_map"),
        "an empty weight_map": (indexed({"weight_map": {}}), CorruptError, "no weight_map"),
        "a weight_map that is a list": (
            indexed({"weight_map": ["a"]}),
            CorruptError,
            "no weight_map",
        ),
        "a key that is there twice": (
            indexed(b'{"weight_map": {"a": "x", "a": "y"}}'),
            CorruptError,
            "duplicate key",
        ),
        "a place outside": (
            indexed({"weight_map": {"a": "../x.bin"}}),
            UnsafeError,
            "not a path inside",
        ),
        "a place that is a number": (
            indexed({"weight_map": {"a": 5}}),
            UnsafeError,
            "not a path inside",
        ),
    }


@pytest.mark.parametrize("case", list(broken()))
def test_a_broken_directory_is_refused(case: str) -> None:
    store, kind, message = broken()[case]
    assert sniff(store)
    with pytest.raises(kind, match=message) as caught:
        read(store)
    assert isinstance(caught.value, CheckpointingException)
    assert caught.value.file is not None


def test_a_single_file_and_the_files_beside_it_are_read() -> None:
    value = {"model": {"w": filled(torch.float32, 3)}, "epoch": 3}
    for name, config, stem in (
        ("pytorch_model.bin", "config.json", "model"),
        ("adapter_model.bin", "adapter_config.json", "adapter_model"),
    ):
        files = {
            name: saved(value),
            config: b"{}",
            "training_args.bin": b"x",
            "tokenizer.json": b"[]",
        }
        store = MemoryStore(files)
        assert sniff(store)
        catalog = read(store)
        assert list(catalog.tensors) == ["model.w"]
        assert list(catalog.files) == [config, "tokenizer.json"]
        assert facet_of(catalog, WeightFileFacts).stem == stem
        assert catalog.notes == ("these files were not read: training_args.bin",)
        assert entry_bytes(catalog, store, "file:tokenizer.json") == b"[]"
        assert_same(as_torch_file(catalog, store), value)


def test_what_is_no_such_directory_is_left_to_others() -> None:
    data = saved({"w": filled(torch.float32, 3)})
    for files in ({"model.bin": data, "config.json": b"{}"}, {"config.json": b"{}"}, {}):
        assert not sniff(MemoryStore(files))
        with pytest.raises(UnsupportedError, match=r"has no pytorch_model\.bin"):
            read(MemoryStore(files))
    for name in (shard(1), "pytorch_model.bin"):
        assert not sniff(MemoryStore({name: data}, entry=name))
        assert torch_file.sniff(MemoryStore({name: data}, entry=name))


def test_an_index_that_is_pointed_at_stands_for_its_directory() -> None:
    plain = directory(*tensors())
    both = MemoryStore({**plain.contents, "other.bin.index.json": b"{}"}, entry=INDEX)
    assert sniff(both)
    assert read(both).tensors == read(plain).tensors


def test_the_format_is_read_only() -> None:
    assert FORMAT.lay_out is None
    assert FORMAT.name == "torch_bin"


REAL = {name: bytes(data) for name, data in directory(*tensors()).contents.items()}


@settings(max_examples=rounds(300), deadline=None)
@given(
    st.sampled_from(sorted(REAL)),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1),
)
def test_a_damaged_directory_raises_only_our_errors(
    name: str, damages: list[tuple[int, int]]
) -> None:
    data = bytearray(REAL[name])
    for at, byte in damages[:4]:
        data[at % len(data)] = byte
    store = MemoryStore({**REAL, name: data})
    with contextlib.suppress(CheckpointingException):
        contents(read(store), store)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model_fsdp.bin"])
def test_weights_beside_the_states_of_a_trainer_are_the_checkpoint(
    golden: Path, tmp_path: Path, name: str
) -> None:
    path = Path(
        shutil.copytree(golden / "accelerate/plain_bin/checkpoint_0", tmp_path / "checkpoint_0")
    )
    (path / "pytorch_model.bin").rename(path / name)
    opened = open_checkpoint(path)
    assert (opened.format.name, facet_of(opened.catalog, WeightFileFacts).stem) == (
        "torch_bin",
        "model",
    )
    tensors = set(opened.catalog.tensors)
    assert {"0.bias", "0.weight", "1.bias", "1.weight"} <= tensors
    assert "optimizer.state.1.weight.exp_avg" in tensors
