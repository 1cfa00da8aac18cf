"""Differences between entries of pickled dicts are located, and described in short."""

from __future__ import annotations

from core.pickle.equality import describe_difference


def test_the_first_unequal_value_is_named_with_both_values() -> None:
    first = {"a": {"x": 1, "y": {"z": 2}}}
    assert describe_difference(first, {"a": {"x": 1, "y": {"z": 3}}}, "a") == ("a/y/z", "2", "3")
    assert describe_difference(first, {"a": {"x": 1}}, "a") == ("a/y", "{'z': 2}", "missing")
    assert describe_difference(first, {}, "a")[::2] == ("a", "missing")


def test_a_dict_that_contains_itself_is_described() -> None:
    first, other = {"n": 1}, {"n": 2}
    first["self"], other["self"] = first, other  # type: ignore[assignment]
    path, _, _ = describe_difference({"a": first}, {"a": other}, "a")
    assert path == "a/n"
