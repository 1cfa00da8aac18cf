"""Find the uses of names in a pickle: which names it only mentions, and which it calls.

Unpickling only imports a name that is mentioned, but runs a name that is called. Calls are not only
those of the opcodes REDUCE, INST, OBJ, NEWOBJ and NEWOBJ_EX: some harmless constructors call their
arguments, the class in a persistent id is called by old versions of torch, and a BUILD can put a
callable where a later opcode looks for a method.

Source: CPython 3.11 ``pickle.py``, ``Modules/_pickle.c``; the entries of ``pickle/calls.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from core.pickle.call_table import argument_uses
from core.pickle.inert import NO_STATE, Global, Inert, Persistent, walk
from core.pickle.reduce import (
    PARTIAL,
    SCRIPT_OBJECT,
    has_harmless_forms,
    is_harmless_form,
    is_partial,
    is_plain_iterator,
)
from core.values import dataclass

How = Literal["named", "bound", "made", "called", "changed", "unread"]
"""The way in which a pickle uses a name.

``named``: as a value. ``bound``: ``functools.partial`` binds arguments to it. ``made``:
instantiated without ``__init__``. ``called``: called with any arguments. ``changed``: the class,
function or container itself receives items or attributes. ``unread``: called on bytes that were not
examined.
"""

LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_EXTENSION = Global("copyreg", "extension code")
_HOOKS = frozenset({"append", "extend", "__setstate__"})
"""Attributes of an instance that the opcodes APPEND, APPENDS and BUILD call."""
_MAX_NESTING = 100
_CONTAINERS = ("builtins", "collections", "itertools")
"""Modules whose constructors call methods of any mapping or iterable argument."""
_DEFAULTDICT = Global("collections", "defaultdict")
_LAZY = frozenset(
    Global(module, name)
    for module, names in {
        "builtins": ("enumerate", "zip"),
        "itertools": ("chain", "count", "cycle", "islice", "repeat", "zip_longest"),
    }.items()
    for name in names
)
"""Iterators that call no method of their arguments until somebody iterates over them."""
_SCRIPT_OBJECTS = re.compile(r"__torch__\.torch\.classes\.(quantized|sparse|rnn)\.\w+", re.ASCII)
"""torch's C++ classes whose ``__setstate__`` packs tensors: the weights of quantized modules."""
_TAKE_ANYTHING = (*_CONTAINERS, "_operator")
"""Modules whose functions may act on any argument: containers, and the operators on types."""


@dataclass(frozen=True, slots=True)
class Use:
    """A name, and how a pickle uses it.

    Args:
        name: the class or function.
        how: the way in which it is used.
        stream: the pickle that is the argument of ``torch.storage._load_from_bytes``.
    """

    name: Global
    how: How = "named"
    stream: bytes | None = None


def uses_of_call(
    how: str, fn: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None
) -> Iterator[Use]:
    """Yield the uses of one call: its function or class, and the arguments that it calls in turn.

    Args:
        how: opcode of the call, as in ``Inert``.
        fn: the function or class that is called.
    """
    if type(fn) is not Global:
        yield from _uses_of_value(fn, "called")
        return
    if how == "reduce" and is_harmless_form(fn, args):
        return
    is_called = how == "reduce" or (how == "newobj_ex" and fn == SCRIPT_OBJECT)
    yield Use(fn, "called" if is_called else "made")
    keyword_values = tuple((kwargs or {}).values())
    if fn == LOAD_FROM_BYTES:
        # torch's function loads another pickle from its argument.
        for arg in args + keyword_values:
            if isinstance(arg, (bytes, bytearray)):
                yield Use(fn, "called", bytes(arg))
            else:
                yield Use(fn, "unread")
    if fn.module in _CONTAINERS and _calls_methods_of(fn, args):
        yield Use(fn, "changed")
    # Arguments that the function calls or instantiates, by the table. One that is absent by
    # position may be any of those by keyword.
    for position, argument_how in argument_uses(fn.module, fn.name):
        for value in args[position : position + 1] or keyword_values:
            yield from _uses_of_value(value, argument_how)


def _calls_methods_of(fn: Global, args: tuple[object, ...]) -> bool:
    """Return whether a container's constructor may call methods that the pickle has replaced.

    ``dict`` calls ``keys`` of an instance, for example, which may be in the state of that instance.
    """
    # defaultdict only stores its first argument, the factory.
    for arg in args[1:] if fn == _DEFAULTDICT else args:
        if type(arg) is not Inert:
            continue
        if is_plain_iterator(arg) or arg.fn in _LAZY:
            # Only a lazy constructor leaves an iterator alone; a list of an endless one would
            # never be complete.
            if fn not in _LAZY:
                return True
        elif arg.state is not NO_STATE:
            return True
    return False


def uses_by_state(node: Inert) -> Iterator[Use]:
    """Yield the uses of an object whose class acts on its state; none for other objects.

    ``functools.partial`` takes its function and arguments from its state, ``torch.ScriptObject``
    the name of a C++ class.
    """
    if is_partial(node):
        yield from _uses_of_partial(node)
    elif node.fn == SCRIPT_OBJECT and node.state is not NO_STATE:
        name = node.state[-1] if type(node.state) is tuple and node.state else None
        if type(name) is not str or _SCRIPT_OBJECTS.fullmatch(name) is None:
            yield Use(Global(SCRIPT_OBJECT.module, f"{SCRIPT_OBJECT.name}.__setstate__"), "called")


def _uses_of_partial(node: Inert) -> Iterator[Use]:
    """Yield the uses of the functions in the arguments and in the state of a partial."""
    # The state is (function, args, keywords, attributes); its function replaces the one among the
    # arguments. A state of another form is judged like a call of partial.
    functions: tuple[object, ...] = node.args
    if node.state is not NO_STATE:
        is_usual = type(node.state) is tuple and len(node.state) == 4
        functions += node.state[:1] if is_usual else (PARTIAL,)  # type: ignore[index]
    for function in functions:
        if type(function) is Global:
            yield Use(function, "bound")
        elif not is_partial(function):  # a nested partial yields its own uses
            yield Use(_called_instance(function) if type(function) is Inert else PARTIAL, "called")


def is_plain_call(node: Inert) -> bool:
    """Return whether the uses of a call depend on its function only, not on its arguments."""
    fn = node.fn
    if type(fn) is not Global or node.kwargs or (node.items and node.state is not NO_STATE):
        return False
    # Calls of these are judged by their arguments or by the state of the result.
    if has_harmless_forms(fn) or fn in (PARTIAL, SCRIPT_OBJECT):
        return False
    if not node.args:
        return True
    return (
        fn != LOAD_FROM_BYTES
        and fn.module not in _TAKE_ANYTHING
        and not argument_uses(fn.module, fn.name)
    )


def uses_of_state(state: object) -> Iterator[Use]:
    """Yield the calls that a later APPEND or BUILD of an object with this state would run."""
    # A tuple is (attributes, attributes in slots).
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict:
            for name in _HOOKS:
                if name in part:
                    yield from _uses_of_value(part[name], "called")


def uses_of_persistent(value: object) -> Iterator[Use]:
    """Yield the call of the storage class in a persistent id."""
    # ("module", class, source file, source): old torch compares the class with its source.
    if type(value) is tuple and value[:1] == ("module",):
        return
    kind = value[1] if type(value) is tuple and len(value) > 1 else value
    yield from _uses_of_value(kind, "called")


def use_of_extension() -> Use:
    """Return the use of a name that is given only by its number in copyreg's registry."""
    return Use(_EXTENSION, "called")


def use_of_late_append(node: Inert) -> Use:
    """Return the use of an ``append`` that the object's state may have replaced."""
    return Use(_called_instance(node), "changed")


def uses_of_node(node: object) -> Iterator[Use]:
    """Yield the uses of one node of an inert tree, without those of its parts."""
    if type(node) is Global:
        yield Use(node)
    elif type(node) is Inert:
        yield from uses_of_call(node.how, node.fn, node.args, node.kwargs)
        yield from uses_by_state(node)
        if node.items and node.state is not NO_STATE:
            yield from uses_of_state(node.state)
    elif type(node) is Persistent:
        yield from uses_of_persistent(node.value)


USING = frozenset((Global, Inert, Persistent))
"""Types of the nodes of an inert tree that use names."""


def uses_in_tree(tree: object) -> set[Use]:
    """Return every use in an inert tree, except those in pickles nested in it."""
    return {use for node in walk(tree) if type(node) in USING for use in uses_of_node(node)}


def _uses_of_value(value: object, how: Literal["made", "called"]) -> Iterator[Use]:
    """Yield the use of a value that another function calls or instantiates."""
    if type(value) is Global:
        # Nothing judges the state of a ScriptObject that another function creates, so this counts
        # as a call.
        yield Use(value, "called" if value == SCRIPT_OBJECT else how)
    elif type(value) is Inert:
        yield Use(_called_instance(value), "called")


def _called_instance(node: Inert) -> Global:
    """Return the name of the method that runs if the result of a call is called."""
    # The result of a call of a call … is named after the innermost function.
    fn: object = node
    for _ in range(_MAX_NESTING):
        if type(fn) is not Inert:
            break
        fn = fn.fn
    return (
        Global(fn.module, f"{fn.name}.__call__")
        if type(fn) is Global
        else Global("builtins", "object.__call__")
    )
