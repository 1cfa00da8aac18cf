"""An inert tree on its way to live values.

No recursion: every node that needs others is a generator that asks for them, so depth costs memory only. A node that
several places share is made once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from core.dist_checkpointing._values import constructors, numpy_values, torch_values
from core.dist_checkpointing._values.constructors import Filled, Made
from core.dist_checkpointing._values.known_names import KnownNames, member
from core.dist_checkpointing._values.stand_in import NAME, StandIn
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.formats.torch.tensors import unsupported_kind
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Persistent, Size, TensorLeaf
from core.pickle.names import classify

logger = logging.getLogger(__name__)

_CONSTRUCTORS = {**constructors.CONSTRUCTORS, **numpy_values.CONSTRUCTORS, **torch_values.CONSTRUCTORS}
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAX_NAMED = 8
_HINT = "before loading, register a class with torch.serialization.add_safe_globals, or import the module of an enum"

_Steps = Generator[object, Any, Any]
"""Yields the parts that it needs live, is sent them, and returns the value."""


class LiveTree:
    """One run of ``core.dist_checkpointing._values.objects.live_object``; the arguments are those of it."""

    def __init__(self, tensor_of: Callable[[str], torch.Tensor], *, key: str | None = None) -> None:
        self._tensor_of = tensor_of
        self._key = key
        self._done: dict[int, tuple[object, Any]] = {}
        """id of a node → the node, so that its id stays its own, and the value."""
        self._open: set[int] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._unknown: dict[str, None] = {}
        self._names = KnownNames()

    def warn(self) -> None:
        """Says in the log which classes were not known, if any."""
        if self._unknown:
            names = list(self._unknown)
            listed = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
            where = f" of {self._key}" if self._key else ""
            logger.warning(
                "stand-ins%s hold the places of objects whose class is not known here: %s; %s", where, listed, _HINT
            )

    def value_of(self, root: object) -> Any:
        """The live value of a tree.

        Raises: those of ``live_object``.
        """
        stack: list[tuple[object, _Steps]] = []
        sent: Any = None
        node = root
        try:
            while True:
                made = self._ready(node)
                if made is _NOT_YET:
                    stack.append((node, self._steps(node)))
                else:
                    sent = made
                while stack:
                    top, steps = stack[-1]
                    try:
                        node = steps.send(None if made is _NOT_YET else sent)
                        break
                    except StopIteration as end:
                        stack.pop()
                        self._open.discard(id(top))
                        self._done[id(top)] = (top, end.value)
                        sent, made = end.value, end.value
                else:
                    return sent
        except CheckpointingException as err:
            err.key = err.key or self._key
            raise

    def _ready(self, node: Any) -> Any:
        """The value of a node that needs no others, or was made before; else ``_NOT_YET``."""
        kind = type(node)
        if kind in _SCALARS:
            return node
        known = self._done.get(id(node))
        if known is not None:
            return known[1]
        if kind is TensorLeaf:
            return self._tensor(node)
        if kind is Global:
            return self._named(node)
        if kind is bytearray:
            return self._memoized(node, bytearray(node))
        if kind is Size:
            return self._memoized(node, torch.Size(node))
        if id(node) in self._open:
            raise UnsupportedError(f"a {_kind_of(node)} contains itself")
        self._open.add(id(node))
        return _NOT_YET

    def _memoized(self, node: object, value: Any) -> Any:
        self._done[id(node)] = (node, value)
        return value

    def _steps(self, node: Any) -> _Steps:
        kind = type(node)
        if kind is dict:
            return self._dict(node)
        if kind is list:
            return self._list(node)
        if kind is tuple or kind is set or kind is frozenset:
            return self._sequence(node)
        if kind is Inert:
            return self._record(node)
        if kind is Persistent:
            raise UnsupportedError("a bare storage cannot be loaded")
        what = "reference to another object" if kind is ObjectLeaf else kind.__name__
        raise UnsupportedError(f"a {what} cannot be loaded")

    def _dict(self, node: dict[object, object]) -> _Steps:
        made: dict[Any, Any] = self._memoized(node, {})
        for key, value in node.items():
            live_key = yield key
            live_value = yield value
            _checked(node, partial(made.__setitem__, live_key, live_value))
        return made

    def _list(self, node: list[object]) -> _Steps:
        made: list[Any] = self._memoized(node, [])
        if _SCALARS.issuperset(map(type, node)):
            made += node
            return made
        for item in node:
            made.append((yield item))
        return made

    def _sequence(self, node: Any) -> _Steps:
        if _SCALARS.issuperset(map(type, node)):
            return type(node)(node)
        found = []
        for item in node:
            found.append((yield item))  # noqa: PERF401
        return _checked(node, lambda: type(node)(found))

    def _record(self, node: Inert) -> _Steps:
        kind = unsupported_kind(node)
        if kind is not None:
            raise UnsupportedError(f"a {kind} cannot be loaded")
        args = yield node.args
        fn = node.fn
        if not isinstance(fn, Global):
            raise UnsafeError(f"the object is made by calling {_kind_of(fn)}, which is never done")
        row = _CONSTRUCTORS.get((fn.module, fn.name))
        made: Any = NotImplemented
        filled = _PROGRAMS_OWN
        if isinstance(row, Made):
            if node.kwargs is None and not node.items and not node.entries:
                state = node.state if node.state is NO_STATE else (yield node.state)
                made = _checked(node, partial(row.make, args, state))
            if made is not NotImplemented:
                return made
        elif isinstance(row, Filled):
            filled = row
            if node.kwargs is None:
                made = _checked(node, partial(row.make, *args))
        else:
            found = member(fn, args[0]) if len(args) == 1 else None
            if found is not None:
                return found
            made = yield from self._of_registered(node, fn, args)
        if made is NotImplemented:
            return (yield from self._stand_in(node, fn, args))
        return (yield from self._filled(node, self._memoized(node, made), filled))

    def _filled(self, node: Inert, made: Any, row: Filled) -> _Steps:
        """The container with its items, entries and state in it."""
        for item in node.items:
            live = yield item
            _checked(node, partial(_method(row.add), made, live))
        for key, value in node.entries:
            live_key = yield key
            live = yield value
            _checked(node, partial(_method(row.put), made, live_key, live))
        if node.state is not NO_STATE:
            state = yield node.state
            _checked(node, partial(_method(row.restore), made, state))
        return made

    def _of_registered(self, node: Inert, fn: Global, args: tuple[Any, ...]) -> _Steps:
        """An instance of a class, or the result of a function, that the program registered; else NotImplemented."""
        function = self._names.registered(fn)
        if function is None:
            return NotImplemented
        kwargs = (yield node.kwargs) or {}
        if node.how == "reduce":
            return _checked(node, partial(function, *args))
        return _checked(node, partial(function.__new__, function, *args, **kwargs))

    def _stand_in(self, node: Inert, fn: Global, args: tuple[Any, ...]) -> _Steps:
        self._note_unknown(fn)
        kwargs = yield node.kwargs
        made = StandIn(node.how, fn.module, fn.name, args=args, kwargs=kwargs)
        self._memoized(node, made)
        for item in node.items:
            made.items.append((yield item))
        for key, value in node.entries:
            live_key = yield key
            made.entries.append((live_key, (yield value)))
        if node.state is not NO_STATE:
            made.state = yield node.state
        return made

    def _named(self, node: Global) -> Any:
        """A class, function or value that stands in the tree by its name."""
        found = self._names.value(node)
        if found is None:
            self._note_unknown(node)
            found = StandIn(NAME, node.module, node.name)
        return self._memoized(node, found)

    def _note_unknown(self, fn: Global) -> None:
        """Remembers a name that is not known here.

        Raises:
            UnsafeError: it is known as an attack.
        """
        if classify(fn) == "dangerous" and fn.module != "__main__":  # a script's own class; a stand-in calls nothing
            raise UnsafeError(
                f"the object names {fn}, which would run code if it were called",
                hint="find out who wrote this checkpoint, and leave the object out",
            )
        self._unknown[str(fn)] = None

    def _tensor(self, leaf: TensorLeaf) -> torch.Tensor:
        tensor = self._tensors.get(leaf.key)
        if tensor is None:
            tensor = self._tensor_of(leaf.key)
            needs_grad = leaf.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
            if leaf.wrapper == "parameter":
                tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
            elif needs_grad:
                tensor = tensor.requires_grad_(True)
            self._tensors[leaf.key] = tensor
        return tensor


class _NotYet:
    """The type of ``_NOT_YET``."""


_NOT_YET = _NotYet()


def _checked(node: object, make: Callable[[], Any]) -> Any:
    """``make()``, the errors of unfit arguments as the project's.

    Raises:
        CorruptError: the arguments are none that such an object has.
    """
    try:
        return make()
    except CheckpointingException:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError) as err:
        raise CorruptError(f"a {_kind_of(node)} is malformed: {type(err).__name__}: {str(err)[:200]}") from err


def _kind_of(node: object) -> str:
    return node.class_name if isinstance(node, Inert) else type(node).__name__


def _method(found: Callable[..., Any] | None) -> Callable[..., Any]:
    return _no_such_part if found is None else found


def _no_such_part(*parts: Any) -> None:
    raise TypeError("it has no such parts")


def _restore(made: Any, state: Any) -> None:
    """What BUILD does to an instance of a registered class."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots: Any = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        vars(made).update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


_PROGRAMS_OWN = Filled(
    lambda: None,
    add=lambda made, item: made.append(item),
    put=lambda made, key, value: made.__setitem__(key, value),
    restore=_restore,
)
