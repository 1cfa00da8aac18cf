"""core.pickle.nesting: flattening, rebuilding, and agreement with PyTorch's own rule."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UnsupportedError
from core.formats.torch.tree import load_object
from core.opening.open import open_checkpoint
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, make_ordered_dict
from core.pickle.nesting import (
    REMOVED,
    LeafEntry,
    ListIndex,
    cut_cycles,
    entries,
    map_leaves,
    nest_leaves,
)
from core.verbs.checks.finding import Level
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.formats.torch.torch_samples import opened
from tests.formats.torch.torch_samples import saved as saved_bytes


def test_keys_and_paths_agree_with_torch_flattening() -> None:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    real = {
        "model": {"a.b": torch.zeros(1), "c": {"d": torch.zeros(2)}},
        "optim": {
            "state": {0: {"step": torch.zeros(()), "lr": 0.5}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "plain": [1, 2, (3,)],
        "mixed": [1, {"x": 2}, [torch.zeros(1)]],
        "note": "text",
    }

    def inert(node: object) -> object:
        if isinstance(node, dict):
            return {key: inert(item) for key, item in node.items()}
        if isinstance(node, list):
            return [inert(item) for item in node]
        return node

    flat, paths = flatten_state_dict(real)
    paths_by_key = {
        ".".join(map(str, entry.path)): entry.path for entry in entries(_with_leaves(inert(real)))
    }
    assert list(paths_by_key) == list(flat)
    assert {key: tuple(map(str, path)) for key, path in paths_by_key.items()} == {
        key: tuple(map(str, path)) for key, path in paths.items()
    }


def _with_leaves(node: object) -> object:
    import torch

    if isinstance(node, dict):
        return {key: _with_leaves(item) for key, item in node.items()}
    if isinstance(node, list):
        return [_with_leaves(item) for item in node]
    return TensorLeaf("t") if isinstance(node, torch.Tensor) else node


def test_nested_is_the_inverse_of_entries() -> None:
    tree = {
        "a": {"b.c": TensorLeaf("a.b.c"), "d": [1, 2]},
        "e": [{"f": 1}, TensorLeaf("e.1")],
        "g": {},
    }
    assert nest_leaves({entry.path: entry.leaf for entry in entries(tree)}) == tree


def test_integer_mapping_keys_stay_a_mapping() -> None:
    tree = {"state": {0: {"m": TensorLeaf("state.0.m")}, 1: {"m": TensorLeaf("state.1.m")}}}
    assert nest_leaves({entry.path: entry.leaf for entry in entries(tree)}) == tree


def test_missing_list_elements_become_none() -> None:
    assert nest_leaves({("a", ListIndex(0)): 1, ("a", ListIndex(2)): 3}) == {"a": [1, None, 3]}


@pytest.mark.parametrize(
    "paths",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", ListIndex(0)): 1, ("a", "b"): 2},
        {("a", ListIndex(0)): 1, ("a", ListIndex(10**9)): 2},
    ],
)
def test_contradicting_paths_are_refused(paths: dict[tuple[object, ...], object]) -> None:
    with pytest.raises(CorruptError):
        nest_leaves(paths)


def test_removed_leaves_take_empty_containers_with_them_and_keep_list_indexes() -> None:
    tree = {
        "a": {"x": TensorLeaf("a.x")},
        "b": [TensorLeaf("b.0"), TensorLeaf("b.1")],
        "c": make_ordered_dict({"y": 1}),
    }

    def change(entry: LeafEntry) -> object:
        return REMOVED if entry.key in ("a.x", "b.0") else entry.leaf

    mapped = map_leaves(tree, change)
    assert isinstance(mapped, dict)
    assert mapped["b"] == [None, TensorLeaf("b.1")]
    assert "a" not in mapped
    assert as_mapping(mapped["c"]) == {"y": 1}


def test_cycles_are_an_error_not_a_hang() -> None:
    tree: dict[str, object] = {}
    tree["self"] = tree
    with pytest.raises(CorruptError, match="nested deeper"):
        list(entries(tree))


def test_containers_in_which_no_leaf_changes_are_not_copied() -> None:
    unchanged = {"list": [1, {"x": 2}], "counts": make_ordered_dict({"y": 1})}
    tree = {"kept": unchanged, "changed": {"a": TensorLeaf("a"), "b": {"c": 1}}}
    assert map_leaves(tree, lambda entry: entry.leaf) is tree

    def change(entry: LeafEntry) -> object:
        return TensorLeaf("new") if isinstance(entry.leaf, TensorLeaf) else entry.leaf

    result = map_leaves(tree, change)
    assert isinstance(result, dict)
    assert result["kept"] is unchanged
    assert result["changed"] == {"a": TensorLeaf("new"), "b": {"c": 1}}
    assert tree["changed"]["a"] == TensorLeaf("a")
    assert map_leaves(tree, lambda entry: entry.leaf, copies=True) is not tree


def in_a_dict() -> tuple[object, str]:
    state: dict[str, object] = {"w": torch.ones(2)}
    state["self"] = state
    state["args"] = argparse.Namespace(lr=1)
    return state, "self"


def in_a_list() -> tuple[object, str]:
    items: list[object] = [torch.ones(2)]
    items.append([items])
    return {"w": torch.ones(2), "a": {"items": items}}, "a.items.1.0"


def in_a_list_of_plain_values() -> tuple[object, str]:
    items: list[object] = [1]
    items.append(items)
    return {"w": torch.ones(2), "items": items}, "items.1"


def in_an_ordered_dict() -> tuple[object, str]:
    inner: Any = collections.OrderedDict(w=torch.ones(2))
    inner["up"] = {"m": inner}
    return {"m": inner}, "m.up.m"


def in_a_tuple() -> tuple[object, str]:
    items: list[object] = []
    pair = (items, torch.ones(2))
    items.append(pair)
    return {"w": torch.ones(2), "pair": pair}, "pair.0.0"


CASES: list[Callable[[], tuple[object, str]]] = [
    in_a_dict, in_a_list, in_a_list_of_plain_values, in_an_ordered_dict, in_a_tuple
]  # fmt: skip


def job(source: Path, dst: Path, to: str, **options: Any) -> Job:
    return Job(src=source, dst=dst, to=to, fsync=False, **options)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "to", ["torch", "safetensors", "dcp", "torch_dist", "zarr", "zarr3", "deepspeed_universal"]
)
@pytest.mark.parametrize("make", CASES)
def test_a_container_that_contains_itself_is_refused_by_name_and_can_be_left_out(
    make: Callable[[], tuple[object, str]], to: str, tmp_path: Path
) -> None:
    state, key = make()
    source = tmp_path / "x.pt"
    torch.save(state, source)
    with pytest.raises(UnsupportedError, match="contains the entry itself") as caught:
        run(job(source, tmp_path / "out", to))
    assert (caught.value.key, caught.value.file) == (key, str(source))
    assert caught.value.hint == f"exclude it with: --exclude {key}"
    report = run(job(source, tmp_path / "out", to, exclude=(key,)))
    assert report.n_tensors == len(open_checkpoint(source).catalog.tensors)
    if to == "torch" and key == "self":
        loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=False)
        assert set(loaded) == {"w", "args"} and loaded["args"] == argparse.Namespace(lr=1)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("make", CASES)
def test_validate_finds_what_is_refused(
    make: Callable[[], tuple[object, str]], level: Level, tmp_path: Path
) -> None:
    state, key = make()
    torch.save(state, tmp_path / "x.pt")
    findings = validate(tmp_path / "x.pt", level=level).findings
    assert [(finding.code, finding.key) for finding in findings] == [("CK109", key)]


def test_a_namespace_that_contains_itself_is_refused_by_name_where_no_pickle_keeps_it(
    tmp_path: Path,
) -> None:
    args = argparse.Namespace(lr=1)
    args.self = args
    source = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "train": {"args": args}}, source)
    for number, options in enumerate(
        ({"to": "torch", "weights_only": True}, {"to": "safetensors"}, {"to": "zarr3"})
    ):
        with pytest.raises(UnsupportedError, match="contains itself") as caught:
            run(Job(src=source, dst=tmp_path / "out", fsync=False, **options))  # type: ignore[arg-type]
        assert (caught.value.key, caught.value.file) == ("train.args", str(source))
        assert caught.value.hint is not None and "--exclude" in caught.value.hint
        changes = {**options, "exclude": ("train.args",)}
        run(Job(src=source, dst=tmp_path / str(number), fsync=False, **changes))  # type: ignore[arg-type]
    run(job(source, tmp_path / "y.pt", "torch"))
    namespace = torch.load(tmp_path / "y.pt", weights_only=False)["train"]["args"]
    assert namespace.self is namespace and namespace.lr == 1
    assert not validate(source, level=Level.DEEP).findings


def test_an_object_with_a_stream_of_its_own_is_refused_by_name() -> None:
    from core.engine.catalog.stored import Extent, StoredArray
    from core.files.store import MemoryStore

    data = saved_bytes(in_a_dict()[0])
    stream = StoredArray("raw", "uint8", (len(data),), Extent("f", 0))
    with pytest.raises(UnsupportedError, match="contains itself, at self") as caught:
        load_object(MemoryStore({"f": data}), stream, key="extra")
    assert caught.value.key == "extra"


def test_what_has_no_end_is_not_followed_where_it_is_shared() -> None:
    inner: dict[object, object] = {"t": TensorLeaf("t")}
    inner["up"] = inner
    shared = [1, TensorLeaf("u")]
    tree = {"a": inner, "b": [inner, shared], "c": shared}
    result: Any = cut_cycles(tree)
    assert result["a"] is result["b"][0]
    assert result["a"]["t"] == TensorLeaf("t") and isinstance(result["a"]["up"], ObjectLeaf)
    assert result["c"] is shared is result["b"][1]
    ordered = make_ordered_dict({"x": shared})
    assert cut_cycles([ordered])[0] is ordered  # type: ignore[index]


def test_containers_that_are_only_deep_are_malformed() -> None:
    deep: object = 1
    for _ in range(400):
        deep = {"a": deep}
    with pytest.raises(CorruptError, match="nested deeper"):
        opened(saved_bytes({"w": torch.ones(1), "deep": deep}))
