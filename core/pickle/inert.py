"""Inert stand-ins for Python objects found in pickles.

Nothing here calls or imports what it names. A pickle becomes a tree of plain values (None, bool, int, float, complex,
str, bytes, list, tuple, dict, set, frozenset) and of the classes below; ``core.pickle.writer`` turns such a tree back
into an equal pickle.

Leaves: where a tensor or a separately stored object was, the tree holds ``TensorLeaf(key)`` or ``ObjectLeaf(key)``.
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
        return str(self)  # as torch.float32 has it, so that a tuple of dtypes reads as in torch


class Inert:
    """An object as its pickle describes it.

    Attributes:
        how: ``reduce`` (callable and arguments), ``newobj`` (class and arguments) or ``newobj_ex`` (with keywords).
        fn: what is called or instantiated, nearly always a ``Global``.
        args: positional arguments.
        kwargs: keyword arguments, only with ``newobj_ex``.
        state: what ``__setstate__`` would get, or ``NO_STATE``; for usual objects their attribute dict.
        items: what was appended (list subclasses, deques, sets).
        entries: key and value pairs that were set (dict subclasses).

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
        """Dotted name of what it would be an instance of, or of the function that would make it."""
        fn = self.fn  # of a hostile pickle it may be anything, and printing that may take for ever
        return str(fn) if isinstance(fn, Global) else f"a called {type(fn).__name__}"

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"


class Size(tuple[int, ...]):
    """A ``torch.Size``: a tuple that is told apart from others, so that it is written as what it was."""

    __slots__ = ()


class _NoState:
    """The type of ``NO_STATE``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_STATE"


NO_STATE = _NoState()
"""An object whose pickle sets no state (None would be a legal state)."""


@value(frozen=True, slots=True)
class TensorLeaf:
    """The place of a tensor in a skeleton.

    Args:
        key: the tensor's key in the catalog.
        wrapper: None for a plain tensor; ``parameter`` for a ``torch.nn.Parameter``.
        requires_grad: as the source says.
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
    """A persistent id (torch: a storage) that no one translated."""

    value: object

    def __repr__(self) -> str:
        return f"<persistent {type(self.value).__name__}>"  # printing a hostile value may take for ever


def namespace(fields: dict[str, object]) -> Inert:
    """An inert ``argparse.Namespace``, as Megatron stores its arguments."""
    made = Inert("newobj", Global("argparse", "Namespace"))
    made.state = fields
    return made


def ordered_dict(entries: dict[object, object]) -> Inert:
    """An inert ``collections.OrderedDict``."""
    made = Inert("reduce", Global("collections", "OrderedDict"))
    made.entries = list(entries.items())
    return made


def attributes(value: object) -> dict[str, object] | None:
    """The attribute dict of an inert namespace-like object, or None if ``value`` is not one."""
    if isinstance(value, Inert) and isinstance(value.state, dict):
        return value.state
    return None


def as_mapping(value: object) -> dict[object, object] | None:
    """The entries of a dict or of an inert dict subclass (OrderedDict, defaultdict), or None.

    Later entries win, as they would in Python.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, Inert) and (value.entries or str(value.fn) in _DICT_LIKE):
        return dict(value.entries)
    return None


_DICT_LIKE = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"}


PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types of what neither holds nor names anything."""


def is_flat(items: Iterable[object]) -> bool:
    """Return whether only strings, numbers and None stand in a container; quick for lists of millions."""
    return PLAIN.issuperset(map(type, items))


def walk(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """Every object of an inert tree once, containers first, without recursion; shared and cyclic parts are safe.

    Strings, numbers and None are left out.

    Args:
        seen: ids of containers that are left out; those of the tree are added.
    """
    seen = set() if seen is None else seen
    stack = [value]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in PLAIN:
            continue
        if kind is bytes or kind is Global:
            yield node
            continue
        if kind is list or kind is tuple:  # most others are
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                if node and not is_flat(node):  # type: ignore[arg-type]
                    stack += [item for item in reversed(node) if type(item) not in PLAIN]  # type: ignore[call-overload]
            continue
        if isinstance(node, (dict, list, tuple, set, frozenset, Inert)):
            if id(node) in seen:
                continue
            seen.add(id(node))
        yield node
        if isinstance(node, dict):
            if not (is_flat(node) and is_flat(node.values())):
                for key, item in reversed(node.items()):
                    stack += (item, key)
        elif isinstance(node, (list, tuple, set, frozenset)):
            if not is_flat(node):
                stack += [item for item in reversed(list(node)) if type(item) not in PLAIN]
        elif isinstance(node, Inert):
            for key, item in reversed(node.entries):
                stack += (item, key)
            stack += reversed(node.items)
            if node.state is not NO_STATE:
                stack.append(node.state)
            if node.kwargs:
                stack.append(node.kwargs)
            stack += (node.args, node.fn)
        elif isinstance(node, Persistent):
            stack.append(node.value)


class Weights:
    """How many values inert containers consist of; what several of them share is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, int]] = {}
        """id → (the container, so that its id stays its own; its weight)."""

    def of(self, node: object) -> int:
        """Values in ``node``, itself included; 0 if a tensor is among them, or it is cyclic or nested too deeply."""
        return self._of(node, 0)

    def _of(self, node: object, depth: int) -> int:
        if isinstance(node, TensorLeaf):
            return 0
        if not isinstance(node, (dict, list, tuple, set, frozenset, Inert, Persistent)):
            return 1
        known = self._known.get(id(node))
        if known is not None:
            return known[1]
        self._known[id(node)] = node, 0  # for what is below, if it is cyclic
        if depth == _MAX_DEPTH:
            return 0
        total = 1
        for part in _parts(node):
            weight = self._of(part, depth + 1)
            if not weight:
                return 0
            total += weight
        self._known[id(node)] = node, total
        return total


_MAX_DEPTH = 64


def _parts(node: object) -> Iterator[object]:
    """What stands in a container itself."""
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
