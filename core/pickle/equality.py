"""Compare inert values, which are compared by identity otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.pickle.fields import describe_value
from core.pickle.inert import NO_STATE, Inert, TensorLeaf

_MAX_DEPTH = 8
"""Levels of dicts in which a difference is located."""


def are_same(first: object, second: object) -> bool:
    """Return whether two inert trees are equal.

    Tensors are equal if their keys are, without the rank directory before a colon; whoever needs to
    know compares their contents. Shared and cyclic parts are allowed.
    """
    # Compare pair by pair without recursion: inert trees may be deep, and may contain themselves.
    pairs = [(first, second)]
    compared: set[tuple[int, int]] = set()
    while pairs:
        a, b = pairs.pop()
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        if not isinstance(a, (dict, list, tuple, Inert)):
            if not _are_same_leaves(a, b):
                return False
        elif (id(a), id(b)) not in compared:
            compared.add((id(a), id(b)))
            parts = _paired_parts(a, b)
            if parts is None:
                return False
            pairs += parts
    return True


def _paired_parts(a: object, b: object) -> list[tuple[object, object]] | None:
    """Pair the parts of two containers of one type; None if the containers differ in themselves."""
    if isinstance(a, Inert):
        assert isinstance(b, Inert)
        if a.how != b.how or (a.state is NO_STATE) != (b.state is NO_STATE):
            return None

        # Objects are equal if their functions, arguments and contents are.
        parts: list[tuple[object, object]] = [
            (a.fn, b.fn),
            (a.args, b.args),
            (a.kwargs, b.kwargs),
            (a.items, b.items),
            (a.entries, b.entries),
        ]
        return parts if a.state is NO_STATE else [*parts, (a.state, b.state)]
    assert isinstance(a, (dict, list, tuple)) and isinstance(b, (dict, list, tuple))
    if len(a) != len(b):
        return None

    # Dicts are equal only with their keys in the same order, which files keep.
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return [*zip(a, b, strict=True), *zip(a.values(), b.values(), strict=True)]
    return list(zip(a, b, strict=True))


def _are_same_leaves(a: object, b: object) -> bool:
    """Return whether two leaves of one type are equal; NaN equals NaN."""
    if isinstance(a, TensorLeaf):
        assert isinstance(b, TensorLeaf)
        return (a.key.partition(":")[2] or a.key) == (b.key.partition(":")[2] or b.key)
    is_nan = isinstance(a, float) and isinstance(b, float) and a != a and b != b
    return a == b or is_nan


def describe_difference(
    first: Mapping[Any, object], other: Mapping[Any, object], name: object
) -> tuple[str, str, str]:
    """Describe where an entry of two dicts differs.

    Args:
        first, other: dicts of which the entry ``name`` is unequal.

    Returns:
        The path of the first unequal value in the entry, and both values as short texts.
    """
    path = str(name)
    # Dicts of a pickle may contain themselves.
    for _ in range(_MAX_DEPTH):
        inner, other_inner = first.get(name), other.get(name)
        if not isinstance(inner, dict) or not isinstance(other_inner, dict):
            break
        differing = [
            key
            for key in [*inner, *other_inner]
            if key not in inner
            or key not in other_inner
            or not are_same(inner[key], other_inner[key])
        ]
        if not differing:  # only the order of the keys differs
            break
        first, other, name = inner, other_inner, differing[0]
        path = f"{path}/{name}"
    texts = [
        describe_value(entries[name]) if name in entries else "missing"
        for entries in (first, other)
    ]
    return path, texts[0], texts[1]
