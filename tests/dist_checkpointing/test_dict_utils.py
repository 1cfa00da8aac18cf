"""Walks over trees: like megatron-core's on any nesting of dicts and lists."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.dist_checkpointing import dict_utils
from core.dist_checkpointing.mapping import ShardedTensor

leaves = st.integers(0, 5) | st.sampled_from(["x", None, (1, 2)])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)
containers = st.lists(trees, max_size=3) | st.dictionaries(
    st.sampled_from("abc"), trees, max_size=3
)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """megatron-core's module of the same name."""
    pytest.importorskip("megatron.core")
    return pytest.importorskip("megatron.core.dist_checkpointing.dict_utils")


def is_odd(leaf: Any) -> bool:
    return isinstance(leaf, int) and leaf % 2 == 1


@given(tree=containers, as_dicts=st.booleans())
def test_matching_leaves_are_told_from_others_within_their_nesting(
    theirs: ModuleType, tree: Any, as_dicts: bool
) -> None:
    before = copy.deepcopy(tree)
    assert dict_utils.extract_matching_values(
        tree, is_odd, as_dicts
    ) == theirs.extract_matching_values(tree, is_odd, as_dicts)
    assert tree == before


@given(tree=containers)
def test_leaves_are_visited_in_order(theirs: ModuleType, tree: Any) -> None:
    assert list(dict_utils.nested_values(tree)) == list(theirs.nested_values(tree))
    assert list(dict_utils.nested_items_iter(tree)) == list(theirs.nested_items_iter(tree))


@given(tree=trees)
def test_leaves_are_mapped_in_place_and_out_of_place(theirs: ModuleType, tree: Any) -> None:
    def doubled(leaf: Any) -> Any:
        return [leaf, leaf]

    first, other, unchanged = copy.deepcopy(tree), copy.deepcopy(tree), copy.deepcopy(tree)
    assert dict_utils.dict_list_map_inplace(doubled, first) == theirs.dict_list_map_inplace(
        doubled, other
    )
    assert first == other
    assert dict_utils.dict_list_map_outplace(doubled, tree) == theirs.dict_list_map_outplace(
        doubled, unchanged
    )
    assert tree == unchanged
    if isinstance(tree, dict):
        for function, call in (
            ("dict_map", str),
            ("dict_map_with_key", lambda key, leaf: (key, leaf)),
        ):
            first, other = copy.deepcopy(tree), copy.deepcopy(tree)
            assert (
                getattr(dict_utils, function)(call, first)
                is getattr(theirs, function)(call, other)
                is None
            )
            assert first == other


@given(first=trees, other=trees)
def test_trees_merge_to_the_same_or_in_neither(theirs: ModuleType, first: Any, other: Any) -> None:
    merges = []
    for module in (dict_utils, theirs):
        target = copy.deepcopy(first)
        try:
            merged = module.merge(target, copy.deepcopy(other))
            assert merged is target
            merges.append(merged)
        except ValueError:
            merges.append("refused")
    assert merges[0] == merges[1]


@given(tree=containers)
def test_what_was_told_apart_merges_again(tree: Any) -> None:
    if isinstance(tree, dict):
        parts = dict_utils.extract_matching_values(tree, is_odd, return_lists_as_dicts=True)
        merged = dict_utils.merge(*copy.deepcopy(parts))
        assert sorted(map(str, dict_utils.nested_values(merged))) == sorted(
            str(leaf)
            for leaf in dict_utils.nested_values(tree)
            if not isinstance(leaf, dict | list)
        )


dicts = st.recursive(
    leaves, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=12
)


@given(first=dicts, other=dicts)
def test_differences_of_dicts_are_the_same(theirs: ModuleType, first: Any, other: Any) -> None:
    def comparable(
        tree: Any,
    ) -> Any:  # tuples of unequal types or lengths are reported differently, see below
        return dict_utils.dict_list_map_outplace(
            lambda leaf: str(leaf) if isinstance(leaf, tuple) else leaf, tree
        )

    first, other = comparable(first), comparable(other)
    our_difference, their_difference = dict_utils.diff(first, other), theirs.diff(first, other)
    assert [sorted(map(str, part)) for part in our_difference] == [
        sorted(map(str, part)) for part in their_difference
    ]


def test_lists_of_unequal_lengths_differ_in_the_paths_beyond_the_shorter() -> None:
    assert dict_utils.diff({"a": [1, 2, 3]}, {"a": [1, 4]}, ("top",)) == (
        [("top", "a", 2)],
        [],
        [(("top", "a", 1), int, int)],
    )
    assert dict_utils.diff([1], [1, 2]) == ([], [(1,)], [])
    assert dict_utils.diff([1], (1,)) == ([], [], [((), list, tuple)])
    assert dict_utils.diff(np.array(1), np.array(1)) == ([], [], [])
    assert dict_utils.diff(np.array([1, 2]), np.array([1, 3]))[2] == [((1,), np.int64, np.int64)]


def test_tensors_differ_by_their_elements_or_shapes() -> None:
    first, other = torch.zeros(2, 2), torch.tensor([[0, 0], [5.0, 0]])
    assert dict_utils.diff({"a": first}, {"a": first.clone()}) == ([], [], [])
    ((path, *types, n_unequal, shape, where),) = dict_utils.diff({"a": first}, {"a": other})[2]
    assert (path, types, int(n_unequal), shape, where) == (
        ("a",),
        [torch.Tensor] * 2,
        1,
        (2, 2),
        [[1, 0]],
    )
    assert dict_utils.diff(first, torch.zeros(3))[2] == [
        ((), torch.Tensor, torch.Tensor, (2, 2), (3,))
    ]


def test_sharded_tensors_differ_by_their_data() -> None:
    first, other = (
        ShardedTensor.from_rank_offsets("w", torch.full((2,), value)) for value in (0.0, 1.0)
    )
    assert dict_utils.diff(first, first) == ([], [], [])
    assert dict_utils.diff({"a": first}, {"a": other})[2][0][0] == ("a", ShardedTensor)
    assert dict_utils.diff({"a": first}, {"a": 3})[2] == [(("a",), ShardedTensor, int)]


def test_types_are_written_line_by_line_as_megatron_core_does(
    theirs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nameless:
        def __str__(self) -> str:
            raise RuntimeError

    tree = {"a": [1, {"b": torch.zeros(2)}], "c": "x" * 40, "d": Nameless(), "e": {}}
    dict_utils.inspect_types(tree)
    ours = capsys.readouterr().out
    theirs.inspect_types(tree)
    assert ours == capsys.readouterr().out


@given(xs=st.lists(st.integers(0, 9)))
def test_values_are_grouped_by_key(theirs: ModuleType, xs: list[int]) -> None:
    calls = {"key_fn": lambda x: x % 3, "value_fn": str, "reduce_fn": "".join}
    assert dict_utils.map_reduce(xs, **calls) == theirs.map_reduce(xs, **calls)
    assert dict_utils.map_reduce(xs) == theirs.map_reduce(xs)


def test_a_leaf_has_no_matching_values() -> None:
    with pytest.raises(ValueError):
        dict_utils.extract_matching_values(3, is_odd)  # type: ignore[arg-type]


def test_sequences_whose_elements_have_different_lengths_are_walked() -> None:
    assert dict_utils.diff([1, [2, 3]], [1, [2, 3]]) == ([], [], [])
    assert dict_utils.diff({"a": (1, (2, 3), "x")}, {"a": (1, (2, 4), "x")}) == (
        [],
        [],
        [(("a", 1, 1), int, int)],
    )
