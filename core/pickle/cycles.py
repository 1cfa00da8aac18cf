"""State dicts that contain themselves: a container refers to a container that encloses it.

A pickle can express that, but a path through such a reference never ends. ``cut_cycles`` replaces
those references and nothing else.
"""

from __future__ import annotations

import shlex

from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import ObjectLeaf, as_mapping, rebuild
from core.pickle.nesting import MAX_DEPTH

ENDLESS = "reference to an enclosing container"
"""Description, for users, of the leaf that ``cut_cycles`` puts in place of a reference."""
_REFERENCE = ObjectLeaf("#endless")


def endless_error(key: str) -> UnsupportedError:
    """Return the error for an entry that refers to a container that encloses it."""
    return UnsupportedError(
        "a container contains itself: this entry refers to an enclosing container",
        key=key,
        hint=f"exclude it with: --exclude {shlex.quote(key)}",
    )


def cut_cycles(root: object) -> object:
    """Replace each reference that closes a cycle by an ``ObjectLeaf``, and return the new tree.

    Containers that are shared by several places remain shared, and a container without such a
    reference below it remains the same object.

    Raises:
        CorruptError: the containers are nested deeper than ``MAX_DEPTH``.
    """
    return _cut(root, {}, 0)


def _cut(node: object, finished: dict[int, object], depth: int) -> object:
    """Cut the cycles in a part of the tree.

    Args:
        finished: id of each container that was reached → its result, or ``_REFERENCE`` while its
            parts are still being processed.
        depth: levels of containers above the node.
    """
    mapping = as_mapping(node)
    if mapping is None and not isinstance(node, (list, tuple)):
        return node
    if id(node) in finished:
        return finished[id(node)]
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    # A reference to this container that is met before it is finished closes a cycle.
    finished[id(node)] = _REFERENCE
    parts = dict(enumerate(node)) if isinstance(node, (list, tuple)) else mapping or {}
    new_parts = {name: _cut(part, finished, depth + 1) for name, part in parts.items()}
    # A container without a cycle below it stays the same object.
    is_same = all(new_parts[name] is part for name, part in parts.items())
    finished[id(node)] = node if is_same else rebuild(node, new_parts)
    return finished[id(node)]
