"""Inert stand-ins for Python objects found in pickles.

Nothing in this module calls or imports what a pickle names. A pickle becomes a tree of plain values
(None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset) and of the classes
below; ``core.pickle.writer`` turns such a tree back into an equal pickle.

Leaves: in place of a tensor or of a separately stored object, the tree holds ``TensorLeaf(key)`` or
``ObjectLeaf(key)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from core.arrays.fast_value import value


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of a class or function; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return str(self)  # like torch.float32, so that a tuple of dtypes reads as in torch


class Inert:
    """An object as its pickle describes it.

    Attributes:
        how: ``reduce`` (callable and arguments), ``newobj`` (class and arguments) or ``newobj_ex``
            (with keywords).
        fn: the function or class, nearly always a ``Global``.
        args: positional arguments.
        kwargs: keyword arguments, only with ``newobj_ex``.
        state: the argument of ``__setstate__``, or ``NO_STATE``; most objects have their attribute
            dict.
        items: the appended items (list subclasses, deques, sets).
        entries: the (key, value) pairs that were set (dict subclasses).

    Equality is identity: trees may be cyclic.
    """

    __slots__ = ("args", "entries", "fn", "how", "items", "kwargs", "state")

    def __init__(
        self,
        how: str,
        fn: object,
        args: tuple[object, ...] = (),
        *,
        kwargs: dict[str, object] | None = None,
        state: object = None,
    ) -> None:
        self.how = how
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.state: object = NO_STATE if state is None else state
        self.items: list[object] = []
        self.entries: list[tuple[object, object]] = []

    @property
    def class_name(self) -> str:
        """Return the dotted name of the object's class, or of the function that would make it."""
        fn = self.fn  # in a hostile pickle any object, and printing that may take for ever
        return str(fn) if isinstance(fn, Global) else f"a called {type(fn).__name__}"

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"


class Size(tuple[int, ...]):
    """A ``torch.Size``: a class of its own, so that it is not written as a plain tuple."""

    __slots__ = ()


class _NoState:
    """The type of ``NO_STATE``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_STATE"


NO_STATE = _NoState()
"""The state of an object whose pickle sets none (None would be a legal state)."""


@value(frozen=True, slots=True)
class TensorLeaf:
    """The place of a tensor in a skeleton.

    Args:
        key: the tensor's key in the catalog.
        wrapper: None for a plain tensor; ``parameter`` for a ``torch.nn.Parameter``.
        requires_grad: as stored.
    """

    key: str
    wrapper: str | None = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """The place of a separately stored object in a skeleton."""

    key: str


@dataclass(frozen=True, slots=True, repr=False)
class Persistent:
    """A persistent id (in torch, of a storage) that the reader did not translate."""

    value: object

    def __repr__(self) -> str:
        # Only the type: printing a hostile value may take for ever.
        return f"<persistent {type(self.value).__name__}>"


def make_namespace(fields: dict[str, object]) -> Inert:
    """Return an inert ``argparse.Namespace``, in which Megatron stores its arguments."""
    record = Inert("newobj", Global("argparse", "Namespace"))
    record.state = fields
    return record


def make_ordered_dict(entries: dict[object, object]) -> Inert:
    """Return an inert ``collections.OrderedDict``."""
    record = Inert("reduce", Global("collections", "OrderedDict"))
    record.entries = list(entries.items())
    return record


def attributes(value: object) -> dict[str, object] | None:
    """Return the attribute dict of an inert object, or None if ``value`` has none."""
    if isinstance(value, Inert) and isinstance(value.state, dict):
        return value.state
    return None


def as_mapping(value: object) -> dict[object, object] | None:
    """Return the entries of a dict or of an inert dict subclass; None for any other value.

    Of equal keys the last one counts, as in Python.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, Inert) and (value.entries or str(value.fn) in _DICT_LIKE):
        return dict(value.entries)
    return None


_DICT_LIKE = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
}


PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types of values that have no parts and name nothing."""


def is_flat(items: Iterable[object]) -> bool:
    """Return whether a container holds only strings, numbers and None; quick for millions."""
    return PLAIN.issuperset(map(type, items))


def walk(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """Yield every object of an inert tree once, containers before their parts.

    Strings, numbers and None are left out. Shared and cyclic parts are safe, and nothing recurses.

    Args:
        seen: ids of containers to leave out; the ids of the containers of the tree are added.
    """
    visited = set() if seen is None else seen
    stack = [value]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in PLAIN:
            continue
        # Most nodes are of these types, so they are handled without calling ``_children``.
        if kind is bytes or kind is Global:
            yield node
        elif kind is list or kind is tuple:
            if id(node) not in visited:
                visited.add(id(node))
                yield node
                if node and not is_flat(node):  # type: ignore[arg-type]
                    stack += [item for item in reversed(node) if type(item) not in PLAIN]  # type: ignore[call-overload]
        elif not isinstance(node, _CONTAINERS):
            yield node
            if isinstance(node, Persistent):
                stack.append(node.value)
        elif id(node) not in visited:
            visited.add(id(node))
            yield node
            stack += reversed(_children(node))


_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def _children(node: object) -> list[object]:
    """Return the parts of a container in the order of ``walk``; plain ones may be left out."""
    if isinstance(node, Inert):
        children = [node.fn, node.args]
        if node.kwargs:
            children.append(node.kwargs)
        if node.state is not NO_STATE:
            children.append(node.state)
        children += node.items
        for entry in node.entries:
            children += entry
        return children
    if isinstance(node, dict):
        if is_flat(node) and is_flat(node.values()):
            return []
        return [part for entry in node.items() for part in entry]
    assert isinstance(node, (list, tuple, set, frozenset))
    return [item for item in node if type(item) not in PLAIN]


class ValueCounter:
    """A counter of the values in inert containers, which looks at shared containers only once."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[object, int]] = {}
        """id → (the container, so that no other object gets its id; its count)."""

    def of(self, node: object) -> int:
        """Return the number of values in a tree, its root included.

        Returns:
            0 if a tensor is among the values, or the tree is cyclic or nested too deeply.
        """
        return self._of(node, 0)

    def _of(self, node: object, depth: int) -> int:
        if isinstance(node, TensorLeaf):
            return 0
        if not isinstance(node, (*_CONTAINERS, Persistent)):
            return 1
        counted = self._counted.get(id(node))
        if counted is not None:
            return counted[1]
        self._counted[id(node)] = node, 0  # met again below only if the tree is cyclic
        if depth == _MAX_DEPTH:
            return 0
        total = 1
        for part in _parts(node):
            weight = self._of(part, depth + 1)
            if not weight:
                return 0
            total += weight
        self._counted[id(node)] = node, total
        return total


_MAX_DEPTH = 64


def _parts(node: object) -> Iterator[object]:
    """Yield all parts of a container, plain ones too."""
    if isinstance(node, dict):
        yield from node
        yield from node.values()
    elif isinstance(node, (list, tuple, set, frozenset)):
        yield from node
    elif isinstance(node, Persistent):
        yield node.value
    elif isinstance(node, Inert):
        yield from (node.fn, node.args, node.kwargs)
        if node.state is not NO_STATE:
            yield node.state
        yield from node.items
        for key, item in node.entries:
            yield key
            yield item
