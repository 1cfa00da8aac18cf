"""Inert values as plain containers, and back."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.pickle.inert import (
    NO_STATE,
    Global,
    Inert,
    ObjectLeaf,
    Persistent,
    TensorLeaf,
    make_namespace,
    walk,
)
from core.pickle.plain import from_plain, to_plain
from core.pickle.reader import load
from core.pickle.writer import dumps
from tests.support.rounds import rounds


def description(value: Any) -> object:
    """A comparable form of an inert tree."""
    if isinstance(value, Inert):
        state = None if value.state is NO_STATE else ("state", description(value.state))
        rest = (value.args, value.kwargs, value.items, value.entries)
        return (value.how, description(value.fn), *(description(part) for part in rest), state)
    if isinstance(value, dict):
        return ("dict", [(description(key), description(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [description(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(repr(description(item)) for item in value))
    return (type(value).__name__, repr(value))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(60, 5000).map(lambda n: -(1 << n)),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.complex_numbers(),
    st.sampled_from(["$tuple", "$", "$x", "state"]),
    st.builds(Global, st.text(max_size=3), st.text(max_size=3)),
    st.builds(TensorLeaf, st.text(max_size=3), st.sampled_from([None, "parameter"]), st.booleans()),
    st.builds(ObjectLeaf, st.text(max_size=3)),
)
KEYS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.text(max_size=3),
        st.sampled_from(["$tuple", "$call"]),
    ),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)


@st.composite
def records(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Inert:
    how = draw(st.sampled_from(["reduce", "newobj", "newobj_ex"]))
    fn = draw(st.one_of(st.builds(Global, st.just("m"), st.just("C")), inner))
    record = Inert(how, fn, tuple(draw(st.lists(inner))))
    if draw(st.booleans()):
        record.kwargs = draw(st.dictionaries(st.text(max_size=3), inner, max_size=2))
    if draw(st.booleans()):
        record.state = draw(inner)
    record.items = draw(st.lists(inner, max_size=2))
    record.entries = draw(st.lists(st.tuples(inner, inner), max_size=2))
    return record


TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
        st.builds(Persistent, inner),
        records(inner),
    ),
    max_leaves=12,
)


@settings(max_examples=rounds(400), deadline=None)
@given(TREES)
def test_any_inert_tree_comes_back(tree: object) -> None:
    plain = to_plain(tree)
    assert description(from_plain(plain)) == description(tree)
    kinds = {type(None), bool, int, float, str, bytes, list, dict, TensorLeaf}
    assert {type(node) for node in walk(plain)} <= kinds
    assert all(type(key) is str for node in walk(plain) if type(node) is dict for key in node)


@settings(max_examples=rounds(100), deadline=None)
@given(TREES)
def test_a_plain_tree_loads_with_weights_only(tree: object) -> None:
    without_leaves = {TensorLeaf: lambda leaf: leaf.key}
    data = dumps(to_plain(tree), reducers=without_leaves)
    plain = load(data, label="f")
    assert torch._weights_only_unpickler.load(io.BytesIO(data)) is not None or plain is None


@settings(max_examples=rounds(300), deadline=None)
@given(TREES, st.randoms())
def test_damaged_plain_values_raise_only_our_errors(tree: object, random: Any) -> None:
    plain = to_plain([tree, {"$new": {"$global": ["a", "B"]}, "args": []}])
    for node in list(walk(plain)):
        if type(node) is dict and node and random.random() < 0.4:
            key = random.choice(list(node))
            if random.random() < 0.5:
                del node[key]
            else:
                node[key] = random.choice(
                    [1, None, "x", [], [[]], {"$tuple": 1}, [1, 2], {"$set": [{"$dict": []}]}]
                )
    with contextlib.suppress(CheckpointingException):
        from_plain(plain)


def test_a_namespace_reads_well() -> None:
    plain = to_plain(make_namespace({"lr": 0.1, "shape": (1, 2)}))
    assert plain == {
        "$new": {"$global": ["argparse", "Namespace"]},
        "args": [],
        "state": {"lr": 0.1, "shape": {"$tuple": [1, 2]}},
    }


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(a=1, b=[argparse.Namespace()]),
        np.arange(5, dtype=np.uint32),
        np.float64(1.5),
        collections.defaultdict(list, a=[1]),
        collections.OrderedDict(a=1),
        {frozenset({1, 2}): range(3)},
        pickle.PickleError("x"),
    ],
)
def test_real_objects_come_back_through_plain(value: Any) -> None:
    tree = load(pickle.dumps(value, protocol=2), label="f")
    again = pickle.loads(dumps(from_plain(to_plain(tree))))
    if isinstance(value, Exception):
        assert again.args == value.args
    else:
        assert type(again) is type(value)
        assert np.array_equal(again, value) if isinstance(value, np.ndarray) else again == value


def test_shared_parts_stay_shared() -> None:
    shared = make_namespace({"x": 1})
    back = from_plain(to_plain({"a": shared, "b": [shared, shared]}))
    assert isinstance(back, dict)
    assert back["a"] is back["b"][0] is back["b"][1]


def test_many_shared_parts_cost_nothing() -> None:
    laughs: object = (1,)
    for _ in range(2000):
        laughs = (laughs, laughs)
    back = from_plain(to_plain(laughs))
    for _ in range(2000):
        assert isinstance(back, tuple)
        back = back[0]
    assert back == (1,)


def test_a_set_is_spelled_in_one_order() -> None:
    sets = [
        {Inert("reduce", Global("m", "Colour"), (number,)) for number in range(30)}
        for _ in range(3)
    ]
    assert to_plain(sets[0]) == to_plain(sets[1]) == to_plain(sets[2])
    assert to_plain({"b", "a", 3, (1, "x")}) == to_plain({(1, "x"), 3, "a", "b"})


def test_what_contains_itself_is_refused() -> None:
    circle: list[object] = [1]
    circle.append((circle,))
    record = Inert("newobj", Global("m", "C"))
    record.state = {"self": record}
    for value in (circle, record):
        with pytest.raises(UnsupportedError, match="contains itself"):
            to_plain(value)
    plain: list[object] = []
    plain.append({"a": plain})
    with pytest.raises(CorruptError, match="contains itself"):
        from_plain(plain)


def test_what_is_no_inert_value_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError):
        to_plain([object()])
    with pytest.raises(CorruptError):
        from_plain([object()])
