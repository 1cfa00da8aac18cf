"""core.pickle.nesting: flattening, rebuilding, and agreement with PyTorch's own rule."""

from __future__ import annotations

import pytest

from core.errors import CorruptError
from core.pickle.inert import TensorLeaf, as_mapping, make_ordered_dict
from core.pickle.nesting import REMOVED, LeafEntry, ListIndex, entries, map_leaves, nest_leaves


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
    found = {
        ".".join(map(str, entry.path)): entry.path for entry in entries(_with_leaves(inert(real)))
    }
    assert list(found) == list(flat)
    assert {key: tuple(map(str, path)) for key, path in found.items()} == {
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

    made = map_leaves(tree, change)
    assert isinstance(made, dict)
    assert made["b"] == [None, TensorLeaf("b.1")]
    assert "a" not in made
    assert as_mapping(made["c"]) == {"y": 1}


def test_cycles_are_an_error_not_a_hang() -> None:
    tree: dict[str, object] = {}
    tree["self"] = tree
    with pytest.raises(CorruptError, match="nested deeper"):
        list(entries(tree))


def test_containers_in_which_no_leaf_changes_are_not_copied() -> None:
    kept = {"list": [1, {"x": 2}], "counts": make_ordered_dict({"y": 1})}
    tree = {"kept": kept, "changed": {"a": TensorLeaf("a"), "b": {"c": 1}}}
    assert map_leaves(tree, lambda entry: entry.leaf) is tree

    def change(entry: LeafEntry) -> object:
        return TensorLeaf("new") if isinstance(entry.leaf, TensorLeaf) else entry.leaf

    result = map_leaves(tree, change)
    assert isinstance(result, dict)
    assert result["kept"] is kept
    assert result["changed"] == {"a": TensorLeaf("new"), "b": {"c": 1}}
    assert tree["changed"]["a"] == TensorLeaf("a")
    assert map_leaves(tree, lambda entry: entry.leaf, copies=True) is not tree
