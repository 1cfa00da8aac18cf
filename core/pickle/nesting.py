"""Nested containers with leaves: paths, keys, and rebuilding.

The flatten rule is PyTorch DCP's (2.4 and later): mappings are always descended into; lists only if they hold, at any
depth, a tensor or a mapping; everything else is one leaf. A key is its path, dot-joined. Two differences: tuples are
descended into like lists (torch pickles a tuple of tensors whole), and an empty mapping is a leaf (torch drops it).

Source: torch 2.13 ``torch/distributed/checkpoint/_traverse.py``, checked against its output in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from core.arrays.fast_value import value
from core.errors import CorruptError
from core.pickle.inert import PLAIN, Inert, ObjectLeaf, TensorLeaf, as_mapping, is_flat
from core.pickle.key_text import text_of

MAX_DEPTH = 100

Path = tuple[object, ...]
"""Mapping keys and, as ``Index``, list indexes from the root to a leaf."""


class Index(int):
    """A list index in a path, told apart from an integer that is a mapping's key."""


def joined(path: Path) -> str:
    """Return a path as text, dot-joined."""
    return ".".join(map(text_of, path))


@value(frozen=True, slots=True)
class Entry:
    """One leaf of a skeleton.

    Args:
        path: how to get there.
        leaf: a TensorLeaf, an ObjectLeaf, or the plain or inert value itself.
    """

    path: Path
    leaf: object

    @property
    def key(self) -> str:
        """The catalog key: the leaf's own where it has one, else the dot-joined path."""
        if isinstance(self.leaf, (TensorLeaf, ObjectLeaf)):
            return self.leaf.key
        return joined(self.path)


def entries(skeleton: object) -> Iterator[Entry]:
    """Every leaf, in order.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    yield from _entries(skeleton, ())


def _entries(node: object, path: Path) -> Iterator[Entry]:
    if len(path) > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels", key=joined(path[:8]))
    mapping = as_mapping(node)
    if mapping is not None and (mapping or not path):
        for name, item in mapping.items():
            if _is_leaf(item):
                yield Entry((*path, name), item)
            else:
                yield from _entries(item, (*path, name))
    elif isinstance(node, (list, tuple)) and _is_descended(node, len(path)):
        for index, item in enumerate(node):
            if _is_leaf(item):
                yield Entry((*path, Index(index)), item)
            else:
                yield from _entries(item, (*path, Index(index)))
    else:
        yield Entry(path, node)


def _is_leaf(node: object) -> bool:
    """Return whether a value is a leaf at first sight, as most are; others may be leaves as well."""
    kind = type(node)
    return kind in PLAIN or kind is TensorLeaf or (kind is Inert and not node.entries)  # type: ignore[attr-defined]


def containers(skeleton: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Yield path and container of every mapping and sequence that ``entries`` descends into, in order.

    Args:
        once: do not descend again into a container that stands at several places.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    visited: set[int] = set()
    stack: list[tuple[Path, object]] = [((), skeleton)]
    while stack:
        path, node = stack.pop()
        if len(path) > MAX_DEPTH:
            raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels", key=joined(path[:8]))
        mapping = as_mapping(node)
        below: list[tuple[object, object]]
        if mapping is not None and (mapping or not path):
            below = list(mapping.items())
        elif isinstance(node, (list, tuple)) and _is_descended(node, len(path)):
            below = [(Index(index), item) for index, item in enumerate(node)]
        else:
            continue
        yield path, node
        if not (once and id(node) in visited):
            visited.add(id(node))
            stack += [((*path, part), item) for part, item in reversed(below) if isinstance(item, _CONTAINERS)]


_CONTAINERS = (dict, list, tuple, Inert)


def _is_descended(items: list[object] | tuple[object, ...], depth: int) -> bool:
    """Whether a sequence holds a tensor or a mapping at any depth."""
    if depth > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
    if is_flat(items):
        return False
    for item in items:
        kind = type(item)
        if kind in PLAIN or ((kind is list or kind is tuple) and not item):
            continue
        if isinstance(item, (TensorLeaf, ObjectLeaf)) or as_mapping(item) is not None:
            return True
        if isinstance(item, (list, tuple)) and _is_descended(item, depth + 1):
            return True
    return False


def mapped(node: object, change: Callable[[Entry], object]) -> object:
    """The same containers with every leaf replaced by ``change(entry)``; ``REMOVED`` takes it out.

    A leaf removed from a list leaves None, so that the other indexes stay.
    """
    return _mapped(node, (), change)


def _mapped(node: object, path: Path, change: Callable[[Entry], object]) -> object:
    if path and _is_leaf(node):
        return change(Entry(path, node))
    if len(path) > MAX_DEPTH:
        raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels", key=joined(path[:8]))
    mapping = as_mapping(node)
    if mapping is not None and (mapping or not path):
        made = {name: _mapped(item, (*path, name), change) for name, item in mapping.items()}
        kept = {name: item for name, item in made.items() if item is not REMOVED}
        if not isinstance(node, Inert):
            return kept if kept or not path else REMOVED
        copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
        copy.state, copy.items, copy.entries = node.state, list(node.items), list(kept.items())
        return copy if kept or not path else REMOVED
    if isinstance(node, (list, tuple)) and _is_descended(node, len(path)):
        items = [_mapped(item, (*path, Index(index)), change) for index, item in enumerate(node)]
        if all(item is REMOVED for item in items):
            return REMOVED
        plain = [None if item is REMOVED else item for item in items]
        return tuple(plain) if isinstance(node, tuple) else plain
    return change(Entry(path, node))


class _Removed:
    """The type of ``REMOVED``."""


REMOVED = _Removed()
"""What ``mapped``'s callback returns for a leaf that is to go."""


def nested(leaves: Mapping[Path, object]) -> object:
    """Containers made from paths: an ``Index`` element is a list index, any other a dict key.

    Missing list elements become None, as torch's ``set_element`` does.

    Raises:
        CorruptError: a path runs through a leaf, or a container would be both a list and a dict.
    """
    root: _Branch = _Branch()
    for path, leaf in leaves.items():
        node = root
        for name in path[:-1]:
            below = node.setdefault(name, _Branch())
            if not isinstance(below, _Branch):
                raise CorruptError("an entry is both a value and a container", key=joined(path))
            node = below
        if path[-1] in node:
            raise CorruptError("two entries have one path", key=joined(path))
        node[path[-1]] = leaf
    return _finished(root)


class _Branch(dict[object, object]):
    """A container under construction, told apart from a leaf that is a dict."""


def _finished(branch: _Branch) -> object:
    made = {name: _finished(item) if isinstance(item, _Branch) else item for name, item in branch.items()}
    indexes = [name for name in made if isinstance(name, Index)]
    if not indexes:
        return made
    if len(indexes) != len(made) or min(indexes) < 0:
        raise CorruptError(f"a container has both indexes and names: {list(made)[:4]!r}")
    if max(indexes) > 4 * len(indexes) + 1000:
        raise CorruptError(f"a list of {len(indexes)} elements has the index {max(indexes)}")
    return [made.get(Index(index)) for index in range(max(indexes) + 1)]
