"""Compare inert values, which are compared by identity otherwise."""

from __future__ import annotations

from core.pickle.inert import NO_STATE, Inert, TensorLeaf


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
