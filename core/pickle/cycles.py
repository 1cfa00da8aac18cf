"""State dicts that contain themselves: a container refers to one of the containers around it.

A pickle can express that, and a path through such a reference has no end. ``cut_cycles`` replaces
only those references.
"""

from __future__ import annotations

import shlex

from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import Inert, ObjectLeaf, as_mapping
from core.pickle.nesting import MAX_DEPTH

ENDLESS = "reference to a container around it"
"""Description, for users, of the leaf that ``cut_cycles`` puts in place of a reference."""
_REFERENCE = ObjectLeaf("#endless")


def endless_error(key: str) -> UnsupportedError:
    """Return the error for an entry that refers to a container around it."""
    return UnsupportedError(
        "a container contains itself: this entry refers to a container around it",
        key=key,
        hint=f"leave it out: --exclude {shlex.quote(key)}",
    )


def cut_cycles(root: object) -> object:
    """Return a tree in which an ``ObjectLeaf`` replaces each reference that closes a cycle.

    Containers that are shared by several places remain shared, and a container without such a
    reference below it remains the same object.

    Raises:
        CorruptError: the containers are nested too deeply.
    """
    return _cut(root, {}, 0)


def _cut(node: object, finished: dict[int, object], depth: int) -> object:
    """Return a part of the tree without cycles.

    Args:
        finished: id of each container that was reached → its result; the reference while it is
            still open.
    """
    mapping = as_mapping(node)
    if mapping is None and not isinstance(node, (list, tuple)):
        return node
    if id(node) in finished:
        return finished[id(node)]
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    # Whoever refers to this container before it is finished closes a cycle.
    finished[id(node)] = _REFERENCE
    result: object
    if mapping is not None:
        values = {key: _cut(value, finished, depth + 1) for key, value in mapping.items()}
        is_same = all(values[key] is value for key, value in mapping.items())
        result = node if is_same else _with_values(node, values)
    else:
        assert isinstance(node, (list, tuple))
        items = [_cut(item, finished, depth + 1) for item in node]
        is_same = all(old is new for old, new in zip(node, items, strict=True))
        result = node if is_same else tuple(items) if isinstance(node, tuple) else items
    finished[id(node)] = result
    return result


def _with_values(node: object, values: dict[object, object]) -> object:
    """Return a copy of a dict, or of an inert dict subclass, with other values."""
    if not isinstance(node, Inert):
        return values
    copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
    copy.state, copy.items, copy.entries = node.state, node.items, list(values.items())
    return copy
