"""State dicts that contain themselves: where a container refers to one that it stands in.

A pickle can say so, and a path through it has no end. ``cut`` leaves everything but those references.
"""

from __future__ import annotations

import shlex

from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import Inert, ObjectLeaf, as_mapping
from core.pickle.nesting import MAX_DEPTH

ENDLESS = "reference to a container around it"
"""What an ``ObjectLeaf`` is that ``cut`` puts somewhere."""
_REFERENCE = ObjectLeaf("#endless")


def endless_error(key: str) -> UnsupportedError:
    """Return the error for an entry that is a reference to a container that it stands in."""
    return UnsupportedError(
        "a container contains itself: this entry is a reference to one that it stands in",
        key=key,
        hint=f"leave it out: --exclude {shlex.quote(key)}",
    )


def cut(root: object) -> object:
    """Return the containers of a tree without the references that close a circle; an ``ObjectLeaf`` is there instead.

    Containers that several places share remain shared, and what has no such reference below it is the same object.

    Raises:
        CorruptError: the containers are nested too deeply.
    """
    return _cut(root, {}, 0)


def _cut(node: object, finished: dict[int, object], depth: int) -> object:
    """Return a part of the tree.

    Args:
        finished: id of a container → what became of it; the reference while it is open.
    """
    mapping = as_mapping(node)
    if mapping is None and not isinstance(node, (list, tuple)):
        return node
    if id(node) in finished:
        return finished[id(node)]
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    finished[id(node)] = _REFERENCE
    if mapping is not None:
        parts = {key: _cut(part, finished, depth + 1) for key, part in mapping.items()}
        if all(parts[key] is part for key, part in mapping.items()):
            result: object = node
        elif isinstance(node, Inert):
            copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
            copy.state, copy.items, copy.entries = node.state, node.items, list(parts.items())
            result = copy
        else:
            result = parts
    else:
        assert isinstance(node, (list, tuple))
        items = [_cut(item, finished, depth + 1) for item in node]
        is_same = all(before is after for before, after in zip(node, items, strict=True))
        result = node if is_same else tuple(items) if isinstance(node, tuple) else items
    finished[id(node)] = result
    return result
