"""Nested containers with leaves: their paths and keys, and how to rebuild them.

The flatten rule is PyTorch DCP's (2.4 and later): mappings are always descended into; lists only if
they contain a tensor or a mapping at any depth; everything else is one leaf. A key is the path of
its leaf, dot-joined. Two differences: tuples are descended into like lists (torch pickles a tuple
of tensors as one object), and an empty mapping is a leaf (torch drops it).

Source: torch 2.13 ``torch/distributed/checkpoint/_traverse.py``, checked against its output in
tests.

In state dicts that contain themselves, a container refers to a container that encloses it. A pickle
can express that, but a path through such a reference never ends. ``cut_cycles`` replaces
those references and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping

from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import PLAIN, Inert, ObjectLeaf, TensorLeaf, as_mapping, is_flat, rebuild
from core.pickle.key_text import describe_key
from core.values import dataclass

MAX_DEPTH = 100
_ALTERED = re.compile(r"\\\.|~\d+$")
"""An escaped dot or a number, by which a key differs from an equal one."""

Path = tuple[object, ...]
"""Mapping keys and, as ``ListIndex``, list indexes from the root to a leaf."""


class ListIndex(int):
    """A list index in a path, as opposed to an integer key of a mapping."""


def join_path(path: Path) -> str:
    """Join the elements of a path with dots."""
    return ".".join(map(describe_key, path))


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """One leaf of a skeleton.

    Args:
        path: the path from the root to the leaf.
        leaf: a TensorLeaf, an ObjectLeaf, or the plain or inert value itself.
    """

    path: Path
    leaf: object

    @property
    def key(self) -> str:
        """Catalog key: the leaf's own if it has one, else the dot-joined path."""
        if isinstance(self.leaf, (TensorLeaf, ObjectLeaf)):
            return self.leaf.key
        return join_path(self.path)

    @property
    def is_altered(self) -> bool:
        """True if several paths join to the same text, so that the key is another one."""
        return _ALTERED.search(self.key) is not None and self.key != join_path(self.path)


def entries(skeleton: object, path: Path = ()) -> Iterator[LeafEntry]:
    """Yield every leaf of a skeleton, in order.

    Args:
        path: path of the skeleton itself, if it is a part of a larger one.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    parts = _parts(skeleton, path)
    if parts is None:
        yield LeafEntry(path, skeleton)
        return
    for name, item in parts:
        if _is_leaf(item):
            yield LeafEntry((*path, name), item)
        else:
            yield from entries(item, (*path, name))


def _parts(node: object, path: Path) -> Iterable[tuple[object, object]] | None:
    """Return the parts of a container with their path elements; None for a leaf.

    Args:
        path: path of the node; the root is descended into even if it is empty.

    Raises:
        CorruptError: the path is longer than ``MAX_DEPTH``.
    """
    if len(path) > MAX_DEPTH:
        raise CorruptError(
            f"containers are nested deeper than {MAX_DEPTH} levels", key=join_path(path[:8])
        )
    mapping = as_mapping(node)
    if mapping is not None and (mapping or not path):
        return mapping.items()
    if isinstance(node, (list, tuple)) and _is_descended(node, len(path)):
        return [(ListIndex(index), item) for index, item in enumerate(node)]
    return None


def _is_leaf(node: object) -> bool:
    """Return whether a value is certainly a leaf, by a quick test that most leaves pass."""
    if type(node) is Inert:
        return not (node.entries or node.args)
    return type(node) in PLAIN or type(node) is TensorLeaf


def containers(skeleton: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Yield the path and the container of all containers that ``entries`` descends into, in order.

    Args:
        once: descend only once into a container that is shared by several places.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    visited: set[int] = set()
    stack: list[tuple[Path, object]] = [((), skeleton)]
    while stack:
        path, node = stack.pop()
        parts = _parts(node, path)
        if parts is None:
            continue
        yield path, node
        if not (once and id(node) in visited):
            visited.add(id(node))
            below = [((*path, name), item) for name, item in parts if isinstance(item, _CONTAINERS)]
            # Reversed, because the container that is pushed last is visited first.
            stack += reversed(below)


_CONTAINERS = (dict, list, tuple, Inert)


def _is_descended(items: list[object] | tuple[object, ...], depth: int) -> bool:
    """Return whether a sequence holds a tensor or a mapping at any depth.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``.
    """
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    if is_flat(items):
        return False
    for item in items:
        # A quick test first, as there may be millions of plain items and empty lists.
        kind = type(item)
        if kind in PLAIN or ((kind is list or kind is tuple) and not item):
            continue
        if isinstance(item, (TensorLeaf, ObjectLeaf)) or as_mapping(item) is not None:
            return True
        if isinstance(item, (list, tuple)) and _is_descended(item, depth + 1):
            return True
    return False


def map_leaves(
    node: object,
    change: Callable[[LeafEntry], object],
    path: Path = (),
    *,
    copies: bool = False,
) -> object:
    """Return containers with every leaf replaced by ``change(entry)``.

    A container in which no leaf changes is not copied: the result holds the same object.

    Args:
        change: returns the new leaf, or ``REMOVED`` to remove the entry. A removed list item
            becomes None, so that the other indexes stay; a container whose entries are all removed
            is removed too, except for a mapping at the root.
        path: path of the node itself, if it is a part of a larger skeleton.
        copies: copy every container, once for each path that leads to it.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    parts = None if path and _is_leaf(node) else _parts(node, path)
    if parts is None:
        return change(LeafEntry(path, node))
    new_parts: dict[object, object] = {}
    is_same = not copies
    for name, item in parts:
        new_parts[name] = new = map_leaves(item, change, (*path, name), copies=copies)
        is_same = is_same and new is item
    if is_same:
        return node
    remaining = {name: item for name, item in new_parts.items() if item is not REMOVED}
    is_sequence = isinstance(node, (list, tuple))
    if not remaining and (path or is_sequence):
        return REMOVED
    if is_sequence:
        remaining = {name: remaining.get(name) for name in new_parts}
    return rebuild(node, remaining)


class _Removed:
    """The type of ``REMOVED``."""


REMOVED = _Removed()
"""Result of the callback of ``map_leaves`` for a leaf to remove."""


def nest_leaves(leaves: Mapping[Path, object]) -> object:
    """Build containers from paths: a ``ListIndex`` element is a list index, any other a dict key.

    Missing list elements become None, as in torch's ``set_element``.

    Raises:
        CorruptError: a path runs through a leaf, two entries have the same path, or a container
            would be both a list and a dict.
    """
    root = _UnfinishedContainer()
    for path, leaf in leaves.items():
        # Follow the path and create the containers that are missing.
        node = root
        for name in path[:-1]:
            below = node.setdefault(name, _UnfinishedContainer())
            if not isinstance(below, _UnfinishedContainer):
                raise CorruptError("an entry is both a value and a container", key=join_path(path))
            node = below
        if path[-1] in node:
            raise CorruptError("two entries have the same path", key=join_path(path))
        node[path[-1]] = leaf
    return _finish(root)


class _UnfinishedContainer(dict[object, object]):
    """A container under construction, as opposed to a leaf that is a dict."""


def _finish(container: _UnfinishedContainer) -> object:
    """Turn a container under construction into a dict, or into a list if its names are indexes.

    Raises:
        CorruptError: the container mixes indexes and names, or its indexes are too sparse.
    """
    items = {
        name: _finish(item) if isinstance(item, _UnfinishedContainer) else item
        for name, item in container.items()
    }
    indexes = [name for name in items if isinstance(name, ListIndex)]
    if not indexes:
        return items
    if len(indexes) != len(items) or min(indexes) < 0:
        raise CorruptError(
            f"a container mixes list indexes and names: {', '.join(map(str, list(items)[:4]))}"
        )
    # Missing elements become None, so a forged large index could ask for any amount of memory.
    if max(indexes) > 4 * len(indexes) + 1000:
        raise CorruptError(
            f"a list has {len(indexes)} elements, but one has the index {max(indexes)}"
        )
    return [items.get(ListIndex(index)) for index in range(max(indexes) + 1)]


ENDLESS = "reference to an enclosing container"
"""Description, for users, of the leaf that ``cut_cycles`` puts in place of a reference."""
_REFERENCE = ObjectLeaf("#endless")


def endless_error(key: str) -> UnsupportedError:
    """Return the error for an entry that refers to a container that encloses it."""
    return UnsupportedError(
        "this entry refers to a container that contains the entry itself",
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
