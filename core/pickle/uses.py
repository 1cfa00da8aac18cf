"""What a pickle does with the names in it: which it only mentions, and which it calls.

A name that is mentioned is imported by whoever unpickles it, and no more. A name that is called runs. Calls are not
only those of the opcodes REDUCE, INST, OBJ, NEWOBJ and NEWOBJ_EX: some harmless constructors call what they are given,
the class in a persistent id is called by old versions of torch, and a BUILD can put a callable where a later opcode
looks for a method.

Source: CPython 3.11 ``pickle.py``, ``Modules/_pickle.c``; the rows of ``pickle/calls.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from core.pickle.call_table import handed
from core.pickle.inert import NO_STATE, Global, Inert, Persistent, walk
from core.pickle.reduce import (
    PARTIAL,
    SCRIPT_OBJECT,
    has_harmless_forms,
    is_harmless_form,
    is_partial,
    is_plain_iterator,
)

How = Literal["named", "bound", "made", "called", "changed", "unread"]
"""``named``: a value. ``bound``: a function to which ``functools.partial`` binds arguments. ``made``: instantiated
without ``__init__``. ``called``: with any arguments. ``changed``: the class, function or container itself gets items or
attributes. ``unread``: called on bytes that were not looked into."""

LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_EXTENSION = Global("copyreg", "extension code")
_HOOKS = frozenset({"append", "extend", "__setstate__"})
"""Attributes of an instance that the opcodes APPEND, APPENDS and BUILD call."""
_MAX_NESTING = 100
_CONTAINERS = ("builtins", "collections", "itertools")
"""Modules whose constructors take anything that looks like a mapping or can be iterated over."""
_DEFAULTDICT = Global("collections", "defaultdict")
_LAZY = frozenset(
    Global(module, name)
    for module, names in {
        "builtins": ("enumerate", "zip"),
        "itertools": ("chain", "count", "cycle", "islice", "repeat", "zip_longest"),
    }.items()
    for name in names
)
"""Iterators, which fetch nothing from the iterators that they are made of until somebody asks them."""
_SCRIPT_OBJECTS = re.compile(r"__torch__\.torch\.classes\.(quantized|sparse|rnn)\.\w+", re.ASCII)
"""Classes of torch's C++ part whose ``__setstate__`` packs tensors: the weights of quantized modules."""
_TAKE_ANYTHING = (*_CONTAINERS, "_operator")
"""Those, and the one that makes types of arguments."""


@dataclass(frozen=True, slots=True)
class Use:
    """A name, and what a pickle does with it.

    Args:
        stream: the bytes that ``torch.storage._load_from_bytes`` is called on; they are a pickle of their own.
    """

    name: Global
    how: How = "named"
    stream: bytes | None = None


def uses_of_call(how: str, fn: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None) -> Iterator[Use]:
    """Yield what one call uses: its function or class, and what that calls in turn.

    Args:
        how: as in ``Inert``.
    """
    if type(fn) is not Global:
        yield from _uses_of_value(fn, "called")
        return
    if how == "reduce" and is_harmless_form(fn, args):
        return
    yield Use(fn, "called" if how == "reduce" or (how == "newobj_ex" and fn == SCRIPT_OBJECT) else "made")
    if fn == LOAD_FROM_BYTES:
        for arg in (*args, *(kwargs or {}).values()):
            yield Use(fn, "called", bytes(arg)) if isinstance(arg, (bytes, bytearray)) else Use(fn, "unread")
    # A mapping or iterable protocol is looked up on what is handed over: ``dict`` calls ``keys`` of an instance.
    looked_into = args[1:] if fn == _DEFAULTDICT else args  # the factory is only kept
    if fn.module in _CONTAINERS and any(_is_iterated(fn, arg) for arg in looked_into if type(arg) is Inert):
        yield Use(fn, "changed")
    for position, handed_how in handed(fn.module, fn.name):
        values = (args[position],) if position < len(args) else tuple((kwargs or {}).values())
        for value in values:
            yield from _uses_of_value(value, handed_how)


def _is_iterated(fn: Global, arg: Inert) -> bool:
    """Return whether a container's constructor would look into an object, by methods that its state may hold."""
    if is_plain_iterator(arg) or arg.fn in _LAZY:
        return fn not in _LAZY  # a list of an endless iterator
    return arg.state is not NO_STATE


def uses_by_state(node: Inert) -> Iterator[Use]:
    """Yield what an object uses whose class acts on its state, once it has that; nothing for any other object.

    ``functools.partial`` takes function and arguments from it, ``torch.ScriptObject`` the name of a class in C++.
    """
    if is_partial(node):
        functions: tuple[object, ...] = node.args
        if node.state is not NO_STATE:
            is_usual = type(node.state) is tuple and len(node.state) == 4
            functions += node.state[:1] if is_usual else (PARTIAL,)  # type: ignore[index]
        for function in functions:
            if type(function) is Global:
                yield Use(function, "bound")
            elif not is_partial(function):  # which yields its own
                yield Use(_called_instance(function) if type(function) is Inert else PARTIAL, "called")
    elif node.fn == SCRIPT_OBJECT and node.state is not NO_STATE:
        name = node.state[-1] if type(node.state) is tuple and node.state else None
        if type(name) is not str or _SCRIPT_OBJECTS.fullmatch(name) is None:
            yield Use(Global(SCRIPT_OBJECT.module, f"{SCRIPT_OBJECT.name}.__setstate__"), "called")


def is_plain_call(node: Inert) -> bool:
    """Return whether a call uses what every other call of the same function does, whatever its arguments are."""
    fn = node.fn
    if type(fn) is not Global or node.kwargs or (node.items and node.state is not NO_STATE):
        return False
    if has_harmless_forms(fn) or fn in (PARTIAL, SCRIPT_OBJECT):  # judged by arguments, or by their state
        return False
    if not node.args:
        return True
    return fn != LOAD_FROM_BYTES and fn.module not in _TAKE_ANYTHING and not handed(fn.module, fn.name)


def uses_of_state(state: object) -> Iterator[Use]:
    """Yield what is called if an object with this state gets another one, or is appended to."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict:
            for name in _HOOKS:
                if name in part:
                    yield from _uses_of_value(part[name], "called")


def uses_of_persistent(value: object) -> Iterator[Use]:
    """Yield what is called for a persistent id: the class of the storage. That of a module is only named."""
    if type(value) is tuple and value[:1] == ("module",):
        return
    kind = value[1] if type(value) is tuple and len(value) > 1 else value
    yield from _uses_of_value(kind, "called")


def use_of_extension() -> Use:
    """Return the use of a name by its number in copyreg's registry, whatever name that is."""
    return Use(_EXTENSION, "called")


def use_of_late_append(node: Inert) -> Use:
    """Return the use of whatever ``append`` is found on an object that has a state already: it may be any callable."""
    return Use(_called_instance(node), "changed")


def uses_of_node(node: object) -> Iterator[Use]:
    """Yield what one node of an inert tree uses, without what stands below it."""
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
"""Types of the nodes that use names."""


def uses_in_tree(tree: object) -> set[Use]:
    """Return every use in an inert tree, without those in streams inside it."""
    return {use for node in walk(tree) if type(node) in USING for use in uses_of_node(node)}


def _uses_of_value(value: object, how: Literal["made", "called"]) -> Iterator[Use]:
    """Yield the use of what stands where a class or function is called."""
    if type(value) is Global:
        yield Use(value, "called" if value == SCRIPT_OBJECT else how)  # its state would be seen by nobody
    elif type(value) is Inert:
        yield Use(_called_instance(value), "called")


def _called_instance(node: Inert) -> Global:
    """Return the name of what runs if the result of a call is called."""
    fn: object = node
    for _ in range(_MAX_NESTING):
        if type(fn) is not Inert:
            break
        fn = fn.fn
    return Global(fn.module, f"{fn.name}.__call__") if type(fn) is Global else Global("builtins", "object.__call__")
