"""Inert stand-ins for Python objects found in pickles.

Nothing in this module calls or imports what a pickle names. A pickle becomes a tree of plain values
(None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset) and of the classes
below; ``core.pickle.writer`` turns such a tree back into an equal pickle.

A tensor or a separately stored object is represented by a leaf, ``TensorLeaf(key)`` or
``ObjectLeaf(key)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from core.values import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of a class or function, which is never looked up."""

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
        state: the argument of ``__setstate__``, for most objects their attribute dict; or
            ``NO_STATE``.
        items: the appended items (list subclasses, deques, sets).
        entries: the (key, value) pairs that were set (dict subclasses).

    Objects are compared and hashed by identity, because trees may be cyclic.
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
        """Dotted name of the object's class, or of the function that would create it."""
        # In a hostile pickle ``fn`` may be any object, and printing it may take forever.
        fn = self.fn
        return str(fn) if isinstance(fn, Global) else f"a called {type(fn).__name__}"

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"


class Size(tuple[int, ...]):
    """A ``torch.Size``, distinct from a tuple so that it is not written as one."""

    __slots__ = ()


class _NoState:
    """The type of ``NO_STATE``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_STATE"


_COUNTER = Global("collections", "Counter")
NO_STATE = _NoState()
"""The state of an object whose pickle sets no state (None would be a valid state)."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """The leaf of a skeleton that represents a tensor.

    Args:
        key: the tensor's key in the catalog.
        wrapper: None for a plain tensor, ``parameter`` for a ``torch.nn.Parameter``.
        requires_grad: the flag that is stored with the tensor.
    """

    key: str
    wrapper: str | None = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """The leaf of a skeleton that represents a separately stored object."""

    key: str


@dataclass(frozen=True, slots=True, repr=False)
class Persistent:
    """A persistent id (of a storage, in torch) that the reader did not translate."""

    value: object

    def __repr__(self) -> str:
        # Only the type: printing a hostile value may take forever.
        return f"<persistent {type(self.value).__name__}>"


def make_namespace(fields: dict[str, object]) -> Inert:
    """Build an inert ``argparse.Namespace``, in which Megatron stores its arguments."""
    record = Inert("newobj", Global("argparse", "Namespace"))
    record.state = fields
    return record


def make_ordered_dict(entries: dict[object, object]) -> Inert:
    """Build an inert ``collections.OrderedDict``."""
    record = Inert("reduce", Global("collections", "OrderedDict"))
    record.entries = list(entries.items())
    return record


def make_counter(entries: Mapping[object, object]) -> Inert:
    """Build an inert ``collections.Counter``, whose entries are its argument."""
    return Inert("reduce", _COUNTER, (dict(entries),))


def attributes(value: object) -> dict[str, object] | None:
    """Return the attribute dict of an inert object; None for any other value."""
    if isinstance(value, Inert) and isinstance(value.state, dict):
        return value.state
    return None


def as_mapping(value: object) -> dict[object, object] | None:
    """Return the entries of a dict or of an inert dict subclass; None for any other value.

    The last of several equal keys wins, as in Python.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, Inert) and (value.entries or str(value.fn) in _DICT_LIKE):
        return {**_counts_of(value), **dict(value.entries)}
    return None


def _counts_of(value: Inert) -> dict[object, object]:
    """Return the entries in the argument of a ``collections.Counter``; {} for another value."""
    if len(value.args) == 1 and isinstance(value.args[0], dict) and value.fn == _COUNTER:
        return value.args[0]
    return {}


_DICT_LIKE = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
}


def count_values(value: object, *, limit: int | None = None) -> int:
    """Return the number of values in the containers of an inert tree, numbers and keys included.

    Args:
        limit: stop counting when there are more.
    """
    count = 0
    for node in walk(value):
        if isinstance(node, _CONTAINERS):
            count += len(list_parts(node))
            if limit is not None and count > limit:
                break
    return count


def rebuild(container: object, parts: Mapping[object, object]) -> object:
    """Build a container of the kind of a list, tuple, dict or inert dict subclass.

    Args:
        container: the original container.
        parts: the new entries; for a list or tuple, the new items by index, in order.
    """
    if isinstance(container, (list, tuple)):
        items = list(parts.values())
        return tuple(items) if isinstance(container, tuple) else items
    if not isinstance(container, Inert):
        return dict(parts)
    if _counts_of(container):
        return make_counter(parts)
    copy = Inert(container.how, container.fn, container.args, kwargs=container.kwargs)
    copy.state, copy.items, copy.entries = container.state, [*container.items], [*parts.items()]
    return copy


LONG_BYTES = 1 << 10
"""Bytes from which on a string counts as long, where memory is estimated."""
PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types of values without parts, which name no class or function."""


def is_flat(items: Iterable[object]) -> bool:
    """Return whether a container holds only strings, numbers and None; fast for millions."""
    return PLAIN.issuperset(map(type, items))


def walk(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """Yield every object of an inert tree once, containers before their parts.

    Strings, numbers and None are omitted. Shared and cyclic parts are safe, and nothing recurses.

    Args:
        seen: ids of containers to skip; the ids of the tree's containers are added.
    """
    visited = set() if seen is None else seen
    stack = [value]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in PLAIN:
            continue
        # Most leaves are of these types, and need no test whether they are containers.
        if kind is bytes or kind is Global:
            yield node
            continue
        if isinstance(node, _CONTAINERS):
            if id(node) in visited:
                continue
            visited.add(id(node))
        yield node
        # Reversed, as the last part on the stack is visited first.
        parts = parts_to_visit(node)
        stack += [part for part in reversed(parts) if type(part) not in PLAIN]


_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def list_parts(node: object) -> Sequence[object]:
    """Return the direct parts of an inert value, plain ones too; () for a leaf."""
    if isinstance(node, Inert):
        parts = [node.fn, node.args, node.kwargs or None]
        if node.state is not NO_STATE:
            parts.append(node.state)
        parts += node.items
        parts += chain.from_iterable(node.entries)
        return parts
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, dict):
        return list(chain.from_iterable(node.items()))
    if isinstance(node, (set, frozenset)):
        return list(node)
    return (node.value,) if isinstance(node, Persistent) else ()


def parts_to_visit(node: object) -> Sequence[object]:
    """Return the direct parts of an inert value, without those that are obviously plain.

    Large containers of numbers and dicts with keys of type str thus cost little.
    """
    if type(node) is Inert:
        return list_parts(node)
    if isinstance(node, dict) and is_flat(node):
        return () if is_flat(node.values()) else list(node.values())
    parts = list_parts(node)
    return () if is_flat(parts) else parts


class ValueCounter:
    """A counter of the values in inert containers, which visits shared containers only once."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[object, int]] = {}
        """id → (the container, kept so that no other object gets its id; its number of values)."""

    def of(self, node: object, depth: int = 0) -> int:
        """Return the number of values in a tree, its root included.

        Args:
            depth: levels of containers above the node.

        Returns:
            0 if a tensor is among the values, or the tree is cyclic or nested too deeply.
        """
        if isinstance(node, TensorLeaf):
            return 0
        if not isinstance(node, (*_CONTAINERS, Persistent)):
            return 1
        counted = self._counted.get(id(node))
        if counted is not None:
            return counted[1]
        # The count while the parts are being counted: only a cycle leads back here until then.
        self._counted[id(node)] = node, 0
        if depth == _MAX_DEPTH:
            return 0
        total = 1
        for part in list_parts(node):
            n_values = self.of(part, depth + 1)
            if not n_values:
                return 0
            total += n_values
        self._counted[id(node)] = node, total
        return total


_MAX_DEPTH = 64
