"""Nested containers with leaves: paths, keys, and rebuilding.

The flatten rule is PyTorch DCP's (2.4 and later): mappings are always descended into; lists only if
they hold, at any depth, a tensor or a mapping; everything else is one leaf. A key is its path,
dot-joined. Two differences: tuples are descended into like lists (torch pickles a tuple of tensors
as one object), and an empty mapping is a leaf (torch drops it).

Source: torch 2.13 ``torch/distributed/checkpoint/_traverse.py``, checked against its output in
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from core.arrays.fast_value import value
from core.errors import CorruptError
from core.pickle.inert import PLAIN, Inert, ObjectLeaf, TensorLeaf, as_mapping, is_flat
from core.pickle.key_text import text_of

MAX_DEPTH = 100

Path = tuple[object, ...]
"""Mapping keys and, as ``ListIndex``, list indexes from the root to a leaf."""


class ListIndex(int):
    """A list index in a path, as opposed to an integer that is a key of a mapping."""


def join_path(path: Path) -> str:
    """Return a path as text, dot-joined."""
    return ".".join(map(text_of, path))


@value(frozen=True, slots=True)
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
        """Return the catalog key: the leaf's own if it has one, else the dot-joined path."""
        if isinstance(self.leaf, (TensorLeaf, ObjectLeaf)):
            return self.leaf.key
        return join_path(self.path)


def entries(skeleton: object) -> Iterator[LeafEntry]:
    """Yield every leaf of a skeleton, in order.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    yield from _entries(skeleton, ())


def _entries(node: object, path: Path) -> Iterator[LeafEntry]:
    _check_depth(path)
    parts = _parts(node, len(path))
    if parts is None:
        yield LeafEntry(path, node)
        return
    for name, item in parts:
        if _is_leaf(item):
            yield LeafEntry((*path, name), item)
        else:
            yield from _entries(item, (*path, name))


def _check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        raise CorruptError(
            f"containers are nested deeper than {MAX_DEPTH} levels", key=join_path(path[:8])
        )


def _parts(node: object, depth: int) -> Iterable[tuple[object, object]] | None:
    """Return the parts of a container with their path elements; None for a leaf.

    Args:
        depth: levels of containers above the node; the root is descended into even if empty.
    """
    mapping = as_mapping(node)
    if mapping is not None and (mapping or not depth):
        return mapping.items()
    if isinstance(node, (list, tuple)) and _is_descended(node, depth):
        return [(ListIndex(index), item) for index, item in enumerate(node)]
    return None


def _is_leaf(node: object) -> bool:
    """Return whether a value is certainly a leaf; a quick test that most leaves pass."""
    kind = type(node)
    return kind in PLAIN or kind is TensorLeaf or (kind is Inert and not node.entries)  # type: ignore[attr-defined]


def containers(skeleton: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Yield path and container of all containers that ``entries`` descends into, in order.

    Args:
        once: descend only once into a container that several places share.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    visited: set[int] = set()
    stack: list[tuple[Path, object]] = [((), skeleton)]
    while stack:
        path, node = stack.pop()
        _check_depth(path)
        parts = _parts(node, len(path))
        if parts is None:
            continue
        yield path, node
        if not (once and id(node) in visited):
            visited.add(id(node))
            below = [((*path, name), item) for name, item in parts if isinstance(item, _CONTAINERS)]
            stack += reversed(below)


_CONTAINERS = (dict, list, tuple, Inert)


def _is_descended(items: list[object] | tuple[object, ...], depth: int) -> bool:
    """Return whether a sequence holds a tensor or a mapping at any depth."""
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    if is_flat(items):
        return False
    for item in items:
        # A quick test first, as there may be millions of items.
        kind = type(item)
        if kind in PLAIN or ((kind is list or kind is tuple) and not item):
            continue
        if isinstance(item, (TensorLeaf, ObjectLeaf)) or as_mapping(item) is not None:
            return True
        if isinstance(item, (list, tuple)) and _is_descended(item, depth + 1):
            return True
    return False


def map_leaves(node: object, change: Callable[[LeafEntry], object]) -> object:
    """Return the same containers with every leaf replaced by ``change(entry)``.

    Args:
        change: returns the new leaf, or ``REMOVED`` to take the entry out. In a list a removed
            entry leaves None, so that the other indexes stay; containers without any entry left
            are removed too.
    """
    return _mapped(node, (), change)


def _mapped(node: object, path: Path, change: Callable[[LeafEntry], object]) -> object:
    if path and _is_leaf(node):
        return change(LeafEntry(path, node))
    _check_depth(path)
    parts = _parts(node, len(path))
    if parts is None:
        return change(LeafEntry(path, node))
    # The container with its new parts, or without those that are removed.
    new_parts = {name: _mapped(item, (*path, name), change) for name, item in parts}
    remaining = {name: item for name, item in new_parts.items() if item is not REMOVED}
    if isinstance(node, (list, tuple)):
        if not remaining:
            return REMOVED
        items = [None if item is REMOVED else item for item in new_parts.values()]
        return tuple(items) if isinstance(node, tuple) else items
    if path and not remaining:
        return REMOVED
    if not isinstance(node, Inert):
        return remaining
    copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
    copy.state, copy.items, copy.entries = node.state, list(node.items), list(remaining.items())
    return copy


class _Removed:
    """The type of ``REMOVED``."""


REMOVED = _Removed()
"""Result of the callback of ``map_leaves`` for a leaf to be taken out."""


def nest_leaves(leaves: Mapping[Path, object]) -> object:
    """Build containers from paths: a ``ListIndex`` element is a list index, any other a dict key.

    Missing list elements become None, as in torch's ``set_element``.

    Raises:
        CorruptError: a path runs through a leaf, two entries have the same path, or a container
            would be both a list and a dict.
    """
    root = _UnfinishedContainer()
    for path, leaf in leaves.items():
        # Follow the path, making the containers that are missing.
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
    """Return a container under construction as a dict, or as a list if its names are indexes."""
    items = {
        name: _finish(item) if isinstance(item, _UnfinishedContainer) else item
        for name, item in container.items()
    }
    indexes = [name for name in items if isinstance(name, ListIndex)]
    if not indexes:
        return items
    if len(indexes) != len(items) or min(indexes) < 0:
        raise CorruptError(f"a container mixes list indexes and names: {list(items)[:4]!r}")
    # The list is filled up to its largest index, which must not take much memory.
    if max(indexes) > 4 * len(indexes) + 1000:
        raise CorruptError(f"a list of {len(indexes)} elements has the index {max(indexes)}")
    return [items.get(ListIndex(index)) for index in range(max(indexes) + 1)]
