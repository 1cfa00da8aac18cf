"""Conversion of an inert tree to live values.

There is no recursion: a node with parts is converted by a generator that yields its parts, so the
depth of a tree is limited by memory only. A node that occurs in several places is converted once.

Names in a checkpoint are resolved without importing or calling anything (``KnownNames``). Three
kinds are known: classes in the tables of safe constructors, members of enumerations
in modules that are already imported, and everything that the program registered with
``torch.serialization.add_safe_globals``.

Source: torch 2.13 ``torch/_weights_only_unpickler.py`` (spelling of registered names); CPython 3.11
to 3.14 ``enum.py`` (a member is pickled as its class and its value, or as an attribute).
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from core.dist_checkpointing._values import constructors, numpy_values, torch_values
from core.dist_checkpointing._values.constructors import (
    ContainerConstructor,
    Name,
    ValueConstructor,
)
from core.dist_checkpointing._values.stand_in import NAME, StandIn
from core.errors import (
    CheckpointingException,
    CorruptError,
    UnsafeError,
    UnsupportedError,
    list_some,
)
from core.formats.torch.tensors import unsupported_kind
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Persistent, Size, TensorLeaf
from core.pickle.names import classify

logger = logging.getLogger(__name__)

_CONSTRUCTORS = {
    **constructors.CONSTRUCTORS,
    **numpy_values.CONSTRUCTORS,
    **torch_values.CONSTRUCTORS,
}
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_HINT = (
    "before loading, register classes with torch.serialization.add_safe_globals "
    "and import the modules that define enums"
)

_Steps = Generator[object, Any, Any]
"""Generator that yields the parts of a node, receives their live values, and returns the node's."""


class LiveTree:
    """Conversion of one tree; the arguments are those of ``_values.objects.live_object``."""

    def __init__(self, tensor_of: Callable[[str], torch.Tensor], *, key: str | None = None) -> None:
        self._tensor_of = tensor_of
        self._key = key
        self._done: dict[int, tuple[object, Any]] = {}
        """The node and its live value, by the node's id; the reference keeps the id from reuse."""
        self._open: set[int] = set()
        """Ids of the nodes whose parts are being converted."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._unknown: dict[str, None] = {}
        self._names = KnownNames()

    def warn(self) -> None:
        """Log a warning that lists the unknown classes, if there are any."""
        if self._unknown:
            owner = f" of {self._key}" if self._key else ""
            logger.warning(
                "objects%s with unknown classes are loaded as stand-ins: %s; %s",
                owner,
                list_some(self._unknown),
                _HINT,
            )

    def value_of(self, root: object) -> Any:
        """Return the live value of a tree.

        Raises:
            CheckpointingException: the tree cannot be converted; the subclasses are those of
                ``_values.objects.live_object``. Its key is set to that of the object.
        """
        stack: list[tuple[object, _Steps]] = []
        node = root
        try:
            while True:
                # Start a generator for a node with parts; any other node has its value immediately.
                value = self._ready(node)
                if value is _NOT_YET:
                    stack.append((node, self._steps(node)))
                # Send the value to the innermost generator. If it ends, its result goes to the next
                # outer one in turn, until a generator yields a further node.
                while stack:
                    top, steps = stack[-1]
                    try:
                        # A generator that has just been created accepts only None.
                        node = steps.send(None if value is _NOT_YET else value)
                        break
                    except StopIteration as end:
                        stack.pop()
                        self._open.discard(id(top))
                        self._done[id(top)] = (top, end.value)
                        value = end.value
                else:
                    return value
        except CheckpointingException as err:
            err.key = err.key or self._key
            raise

    def _ready(self, node: Any) -> Any:
        """Return the value of a node that has no parts or was converted before, else ``_NOT_YET``.

        Raises:
            UnsupportedError: the node contains itself, and its class cannot be filled later.
            UnsafeError: the node is the name of a known attack.
        """
        kind = type(node)
        if kind in _SCALARS:
            return node
        entry = self._done.get(id(node))
        if entry is not None:
            return entry[1]
        if kind is TensorLeaf:
            return self._tensor(node)
        if kind is Global:
            return self._value_of_name(node)
        if kind is bytearray:
            return self._memoize(node, bytearray(node))
        if kind is Size:
            return self._memoize(node, torch.Size(node))
        # Containers are memoized while empty; any other open node would need itself to be built.
        if id(node) in self._open:
            raise UnsupportedError(f"a {_kind_of(node)} contains itself")
        self._open.add(id(node))
        return _NOT_YET

    def _memoize(self, node: object, value: Any) -> Any:
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
        name = "reference to another object" if kind is ObjectLeaf else kind.__name__
        raise UnsupportedError(f"a {name} cannot be loaded")

    def _dict(self, node: dict[object, object]) -> _Steps:
        result: dict[Any, Any] = self._memoize(node, {})
        for key, value in node.items():
            live_key = yield key
            live_value = yield value
            _run_checked(node, partial(result.__setitem__, live_key, live_value))
        return result

    def _list(self, node: list[object]) -> _Steps:
        result: list[Any] = self._memoize(node, [])
        # Long lists of numbers are common; they are copied without a step for each item.
        if _SCALARS.issuperset(map(type, node)):
            result += node
            return result
        for item in node:
            result.append((yield item))
        return result

    def _sequence(self, node: Any) -> _Steps:
        if _SCALARS.issuperset(map(type, node)):
            return type(node)(node)
        items = []
        for item in node:
            items.append((yield item))  # noqa: PERF401
        return _run_checked(node, lambda: type(node)(items))

    def _record(self, node: Inert) -> _Steps:
        """Convert an object that was pickled as a call.

        Uses the tables, enumerations and registered names, in this order. An object that none of
        them can build becomes a stand-in.

        Raises:
            UnsupportedError: the object is a tensor of a kind that cannot be loaded.
            UnsafeError: the function is not a global name, or is a known attack.
            CorruptError: the arguments are invalid.
        """
        kind = unsupported_kind(node)
        if kind is not None:
            raise UnsupportedError(f"a {kind} cannot be loaded")
        # A call needs its arguments first; what is called must be a global name.
        args = yield node.args
        fn = node.fn
        if not isinstance(fn, Global):
            raise UnsafeError(f"the callable of an object is not a global name: {_kind_of(fn)}")
        # Try the tables, then enumerations, then registered names.
        rule = _CONSTRUCTORS.get((fn.module, fn.name))
        container: Any = NotImplemented
        constructor = _REGISTERED
        if isinstance(rule, ValueConstructor):
            value = yield from self._make_value(node, rule, args)
            if value is not NotImplemented:
                return value
        elif isinstance(rule, ContainerConstructor):
            constructor = rule
            if node.kwargs is None:
                container = _run_checked(node, partial(rule.make, *args))
        else:
            enum_member = member(fn, args[0]) if len(args) == 1 else None
            if enum_member is not None:
                return enum_member
            container = yield from self._make_registered(node, fn, args)
        if container is NotImplemented:
            return (yield from self._make_stand_in(node, fn, args))
        # Memoize the container while it is empty, because its parts may refer to it.
        return (yield from self._fill(node, self._memoize(node, container), constructor))

    def _make_value(
        self, node: Inert, constructor: ValueConstructor, args: tuple[Any, ...]
    ) -> _Steps:
        """Build a value of a class in the tables; NotImplemented for unusual arguments."""
        if node.kwargs is not None or node.items or node.entries:
            return NotImplemented
        state = node.state if node.state is NO_STATE else (yield node.state)
        return _run_checked(node, partial(constructor.make, args, state))

    def _fill(self, node: Inert, container: Any, constructor: ContainerConstructor) -> _Steps:
        """Add items, entries and state to a container, in the order in which pickle does."""
        for item in node.items:
            live = yield item
            _run_checked(node, partial(_require_method(constructor.add), container, live))
        for key, value in node.entries:
            live_key = yield key
            live = yield value
            _run_checked(node, partial(_require_method(constructor.put), container, live_key, live))
        if node.state is not NO_STATE:
            state = yield node.state
            _run_checked(node, partial(_require_method(constructor.restore), container, state))
        return container

    def _make_registered(self, node: Inert, fn: Global, args: tuple[Any, ...]) -> _Steps:
        """Create an instance of a registered class, or call a registered function.

        The result is NotImplemented for names that the program has not registered.
        """
        function = self._names.registered(fn)
        if function is None:
            return NotImplemented
        kwargs = (yield node.kwargs) or {}
        # The opcode REDUCE calls the function; NEWOBJ calls __new__ but not __init__.
        if node.how == "reduce":
            return _run_checked(node, partial(function, *args))
        return _run_checked(node, partial(function.__new__, function, *args, **kwargs))

    def _make_stand_in(self, node: Inert, fn: Global, args: tuple[Any, ...]) -> _Steps:
        # Refuse a known attack before any of its parts is converted.
        self._note_unknown(fn)
        kwargs = yield node.kwargs
        stand_in = StandIn(node.how, fn.module, fn.name, args=args, kwargs=kwargs)
        self._memoize(node, stand_in)
        for item in node.items:
            stand_in.items.append((yield item))
        for key, value in node.entries:
            live_key = yield key
            stand_in.entries.append((live_key, (yield value)))
        if node.state is not NO_STATE:
            stand_in.state = yield node.state
        return stand_in

    def _value_of_name(self, node: Global) -> Any:
        """Return the class, function or value that the tree refers to by name, or a stand-in."""
        value = self._names.value(node)
        if value is None:
            self._note_unknown(node)
            value = StandIn(NAME, node.module, node.name)
        return self._memoize(node, value)

    def _note_unknown(self, fn: Global) -> None:
        """Record an unknown name for the warning.

        Raises:
            UnsafeError: the name is known from attacks.
        """
        # Names of __main__ are classes of a script; a stand-in for one calls nothing.
        if classify(fn) == "dangerous" and fn.module != "__main__":
            raise UnsafeError(
                f"the object refers to {fn}, which can run arbitrary code",
                hint="find out who wrote this checkpoint, and exclude the object",
            )
        self._unknown[str(fn)] = None

    def _tensor(self, leaf: TensorLeaf) -> torch.Tensor:
        tensor = self._tensors.get(leaf.key)
        if tensor is None:
            tensor = self._tensor_of(leaf.key)
            # torch refuses gradients for integers; a damaged file may request them all the same.
            needs_grad = leaf.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
            if leaf.wrapper == "parameter":
                tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
            elif needs_grad:
                tensor = tensor.requires_grad_(True)
            self._tensors[leaf.key] = tensor
        return tensor


class _NotYet:
    """Type of ``_NOT_YET``, the placeholder for a value that is not converted yet."""


_NOT_YET = _NotYet()


def _run_checked(node: object, make: Callable[[], Any]) -> Any:
    """Return ``make()``, with the errors of invalid arguments translated.

    Raises:
        CorruptError: the arguments are invalid for the class of ``node``.
    """
    try:
        return make()
    except CheckpointingException:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as err:
        raise CorruptError(
            f"malformed {_kind_of(node)}: {type(err).__name__}: {str(err)[:200]}"
        ) from err


def _kind_of(node: object) -> str:
    return node.class_name if isinstance(node, Inert) else type(node).__name__


def _require_method(method: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method of a constructor, or for None a function that raises TypeError."""
    return _refuse_parts if method is None else method


def _refuse_parts(*parts: Any) -> None:
    raise TypeError("this class does not accept the items, entries or state that are stored for it")


def _restore_state(instance: Any, state: Any) -> None:
    """Apply a state to an instance of a registered class, as the opcode BUILD does."""
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    # Classes with __slots__ pickle a pair: (dictionary or None, values of the slots).
    slots: Any = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        vars(instance).update(state)
    for name, value in (slots or {}).items():
        setattr(instance, name, value)


_REGISTERED = ContainerConstructor(
    lambda: None,
    add=lambda instance, item: instance.append(item),
    put=lambda instance, key, value: instance.__setitem__(key, value),
    restore=_restore_state,
)
"""Methods to fill instances of registered classes; ``make`` is not used."""


CLASSES = {**constructors.CLASSES, **numpy_values.CLASSES, **torch_values.CLASSES}


class KnownNames:
    """Snapshot of the names that are known to the program when the instance is created."""

    def __init__(self) -> None:
        self._registered: dict[Name, Any] = {}
        for item in torch.serialization.get_safe_globals():
            # torch also accepts pairs (object, "module.name"): an object with another name.
            if isinstance(item, tuple):
                module, _, name = str(item[1]).rpartition(".")
                self._registered[module, name] = item[0]
            else:
                self._registered[item.__module__, item.__qualname__] = item

    def registered(self, fn: Global) -> Any:
        """Return the class or function that the program registered for a name, or None.

        Also None for classes in the tables, which only the tables construct, and for functions of
        the standard library that run code, even if they are registered.
        """
        name = fn.module, fn.name
        return None if name in CLASSES or is_attack(fn) else self._registered.get(name)

    def value(self, fn: Global) -> Any:
        """Return the class, enumeration member or other value that a name refers to, or None."""
        value = CLASSES.get((fn.module, fn.name))
        if value is None:
            value = self.registered(fn)
        # "Color.RED": pickles may refer to a member as an attribute of its enumeration.
        outer, _, last = fn.name.rpartition(".")
        if value is None and outer:
            kind = _imported_enum(fn.module, outer)
            value = None if kind is None else kind.__members__.get(last)
        return value


def member(fn: Global, value: Any) -> Any:
    """Return the member with the given value of the imported enumeration ``fn``.

    Returns:
        The member; for an ``enum.Flag`` also a combination of members. None if ``fn`` is not an
        imported enumeration, or has no such value.
    """
    kind = _imported_enum(fn.module, fn.name)
    if kind is None:
        return None
    # Neither kind(value) nor candidate.value: both may run methods that the class overrides.
    # The types are compared because 1 == True == 1.0.
    for candidate in kind.__members__.values():
        if type(candidate._value_) is type(value) and candidate._value_ == value:
            return candidate
    return _join_flags(kind, value) if issubclass(kind, enum.Flag) and type(value) is int else None


def is_attack(fn: Global) -> bool:
    """Check if a name refers to something in the standard library that can run code.

    Only the standard library counts: the program's own modules may have the same names as other
    modules that attacks use.
    """
    return classify(fn) == "dangerous" and fn.module.partition(".")[0] in sys.stdlib_module_names


def _imported_enum(module: str, name: str) -> Any:
    """Return the enumeration ``name`` of an imported module, or None.

    Names are looked up in dictionaries only, so that no ``__getattr__`` or property is run.
    """
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    return value if isinstance(value, type) and issubclass(value, enum.Enum) else None


def _join_flags(kind: Any, value: int) -> Any:
    """Combine members of the ``enum.Flag`` class ``kind`` into ``value``; None if impossible."""
    bits = 0
    flags: Any = None
    for flag in kind.__members__.values():
        # The empty combination need not be a member, but any flag XOR itself is one.
        if value == 0:
            return flag ^ flag
        if flag._value_ & value == flag._value_:
            bits |= flag._value_
            flags = flag if flags is None else flags | flag
    return flags if bits == value else None
