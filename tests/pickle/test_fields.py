"""``FieldReader``: what passes, what does not, and where its errors say that it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from core.errors import CorruptError, UsageError
from core.pickle.fields import MAX_RANK, FieldReader, describe_value
from core.pickle.inert import Global, Inert, make_ordered_dict

READ = FieldReader("a file", "a tensor", "rank 3", "a hint")


def laughs() -> object:
    nested: object = ()
    for _ in range(60):
        nested = (nested, nested)
    return nested


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (READ.read_int, [0, 7], [True, -1, 1 << 63, 1.0, "7", None]),
        (READ.read_number, [0, -2.5], [False, math.nan, math.inf, 10**400, "1"]),
        (READ.read_text, ["", "a"], [b"a", None, 3]),
        (READ.read_mapping, [{}, {1: 2}], [[], None, Inert("global", Global("a", "b"))]),
        (READ.read_names, [{"a": 1}], [{1: 2}, ["a"]]),
        (READ.read_list, [[], [None], (1,)], ["ab", {1}, {}, None]),
        (READ.read_ints, [(), (1, 2)], [[True], [1, -1], [1 << 63], [laughs()], "12"]),
        (READ.read_shape, [(), (1,) * MAX_RANK], [(1,) * (MAX_RANK + 1), (2.0,), 3]),
    ],
)
def test_only_what_has_the_type_passes(
    read: Callable[..., object], good: list[Any], bad: list[object]
) -> None:
    for value in good:
        assert read(value, "x") == (tuple(value) if read == READ.read_ints else value)
    for value in bad:
        with pytest.raises(CorruptError, match=r"^x is .*, not an? ") as raised:
            read(value, "x")
        error = raised.value
        assert (error.file, error.key, error.rank, error.hint) == (
            "a file",
            "a tensor",
            "rank 3",
            "a hint",
        )


def test_bounds_lengths_and_choices_are_checked() -> None:
    read = FieldReader(error=UsageError)
    assert read.read_int(3, "x", least=1, most=3) == 3
    assert read.read_choices(["a", "b"], "x", ("a", "b"), least=2) == ["a", "b"]
    assert read.read_mapping(make_ordered_dict({"a": 1}), "x") == {"a": 1}
    for fail in (
        lambda: read.read_int(4, "x", most=3),
        lambda: read.read_number(-1, "x", least=0),
        lambda: read.read_list([1], "x", n=2),
        lambda: read.read_choices(["a"], "x", ("a",), least=2),
        lambda: read.read_choices(["a", []], "x", ("a",)),
        lambda: read.read_shape((1, 2), "x", n=1),
    ):
        with pytest.raises(UsageError):
            fail()


def test_any_value_is_described_at_once() -> None:
    assert describe_value([1, "a"]) == "[1, 'a']"
    assert describe_value(Inert("global", Global("torch", "Size"))) == "a torch.Size"
    assert describe_value(10**5000) == "a huge number"
    for value in (laughs(), "x" * 10**6, {n: laughs() for n in range(99)}):
        assert len(describe_value(value)) <= 160
