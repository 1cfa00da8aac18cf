from __future__ import annotations

import math

import pytest

from core.errors import CapacityError
from core.pickle.inert import Global, Inert, TensorLeaf, make_namespace, make_ordered_dict
from core.verbs.diff import entries as diff_entries
from core.verbs.diff.entries import EntryDiff, entry_diffs


def diffs(a: dict[str, object], b: dict[str, object]) -> list[EntryDiff]:
    return entry_diffs(
        a, b, same_tensors=lambda first, other: None if first == other else "it differs"
    )[0]


def test_what_is_missing_or_changed_is_told_with_its_path() -> None:
    a: dict[str, object] = {
        "args": make_namespace({"lr": 0.1, "seed": 1}),
        "list": [1, [2, 3]],
        "gone": None,
    }
    b: dict[str, object] = {"args": make_namespace({"lr": 0.2, "new": "x"}), "list": [1, [2, 4, 5]]}
    assert diffs(a, b) == [
        EntryDiff("args.lr", "changed", "0.1", "0.2"),
        EntryDiff("args.seed", "only_a", "1", None),
        EntryDiff("args.new", "only_b", None, "'x'"),
        EntryDiff("list.1.1", "changed", "3", "4"),
        EntryDiff("list.1.2", "only_b", None, "5"),
        EntryDiff("gone", "only_a", "None", None),
    ]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1}, make_ordered_dict({"a": 1})),
        (1, 1.0),
        (math.nan, math.nan),
        (b"ab", b"ab"),
        (Global("m", "C"), Global("m", "C")),
        ({1, 2}, {2, 1}),
        (Inert("reduce", Global("signal", "Signals"), (15,)), 15),
        (TensorLeaf("t"), TensorLeaf("t")),
        ([0.5] * 700, [0.5] * 700),
    ],
)
def test_what_holds_the_same_is_equal(first: object, other: object) -> None:
    assert diffs({"x": first}, {"x": other}) == []


@pytest.mark.parametrize(
    ("first", "other", "texts"),
    [
        (True, 1, ("True", "1")),
        ("1", 1, ("'1'", "1")),
        (None, 0, ("None", "0")),
        (b"ab", b"ac", ("2 bytes", "a different 2 bytes")),
        (Global("m", "C"), Global("m", "D"), ("m.C", "m.D")),
        (TensorLeaf("t"), TensorLeaf("u"), ("a tensor", "it differs")),
        ([0] * 700, [0] * 699 + [1], ("700 numbers", "1 of them differ")),
        ([0] * 17, [0] * 18, ("list of 17", "list of 18")),
        ({1}, {2}, ("[1]", "[2]")),
        (
            "x" * 100,
            "y" * 100,
            (f"{'x' * 40!r}… (100 characters)", f"{'y' * 40!r}… (100 characters)"),
        ),
        (1 << 5000, 2, ("an integer of 5001 bits", "2")),
        ({"a": 1}, [1], ("dict of 1", "[1]")),
        (Inert("newobj", Global("m", "C")), Inert("newobj", Global("m", "D")), ("m.C", "m.D")),
    ],
)
def test_values_that_differ_are_shown(first: object, other: object, texts: tuple[str, str]) -> None:
    assert diffs({"x": first}, {"x": other}) == [EntryDiff("x", "changed", *texts)]


def test_trees_that_hold_themselves_or_share_their_parts_end() -> None:
    def loop() -> list[object]:
        loop_list: list[object] = [1]
        loop_list.append(loop_list)
        return loop_list

    def bomb() -> list[object]:
        tree: list[object] = []
        for _ in range(60):
            tree = [tree, tree]
        return tree

    assert diffs({"x": loop(), "y": bomb()}, {"x": loop(), "y": bomb()}) == []


def test_deep_trees_do_not_recurse() -> None:
    first: object = 1
    other: object = 2
    for _ in range(20_000):
        first, other = [first], [other]
    (difference,) = diffs({"x": first}, {"x": other})
    assert (difference.a, difference.b) == ("1", "2")


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_entries, "MAX_PAIRS", 100)
    with pytest.raises(CapacityError, match="more than 100 values"):
        diffs({"x": [[n] for n in range(200)]}, {"x": [[n] for n in range(200)]})


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_entries, "MAX_FOUND", 10)
    differences = diffs(
        {"x": [None] * 50, "big": {1 << 30_000: 1}}, {"x": [True] * 50, "big": {1 << 30_000: 2}}
    )
    assert len(differences) == 11
    assert differences[-1].b == "comparison stopped here"


def test_keys_of_any_kind_have_a_name() -> None:
    keyed: dict[object, object] = {
        1 << 30_000: 1,
        (1, 2): 1,
        2.5: 1,
        None: 1,
        "k" * 1000: 1,
        Global("m", "C"): 1,
    }
    paths = [entry.path for entry in diffs({"x": keyed}, {"x": dict.fromkeys(keyed, 2)})]
    assert paths == [
        "x.an integer of 30001 bits",
        "x.<tuple>",
        "x.2.5",
        "x.<NoneType>",
        f"x.{'k' * 300}…",
        "x.m.C",
    ]
