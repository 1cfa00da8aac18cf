"""The table of safe constructors: the classes and functions whose values are rebuilt on loading.

A name that is not in the table, not registered by the program and not an enumeration of an imported
module is never looked up, let alone called. The constructors in the table build plain values only,
from arguments that are checked first.

======================  =========================================================================
Python                  OrderedDict, defaultdict (its factory must be in the table), Counter,
                        deque, Namespace, SimpleNamespace, BytesIO, slice, range, complex,
                        bytearray, set, frozenset, paths, dates and times, Decimal, Fraction,
                        UUID, Random
numpy                   arrays, scalars, dtypes, RandomState, Generator (``numpy_values``)
torch                   Size, device, dtype, layout, Generator (``torch_values``); tensors are
                        not calls at all
======================  =========================================================================

Source: CPython 3.11 to 3.14, ``__reduce_ex__(2)`` of the classes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.pickle.inert import NO_STATE

Name = tuple[str, str]
"""Module and qualified name."""

Args = tuple[Any, ...]

_MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class ValueConstructor:
    """A constructor that builds a value in one step, from parts that are already live.

    Args:
        make: function that builds the value from its arguments and its state, or ``NO_STATE``.
            Returns NotImplemented if they do not have the usual form; raises TypeError or
            ValueError if they are invalid.
    """

    make: Callable[[Args, Any], object]


@dataclass(frozen=True, slots=True)
class ContainerConstructor:
    """A constructor of an empty container that is filled later, so that it may contain itself.

    Args:
        make: function that builds the empty container from its arguments; NotImplemented and
            errors as for ``ValueConstructor``.
        add: function that appends an item, or None if the container has no items.
        put: function that sets a key to a value, or None if the container has no keys.
        restore: function that applies the state, or None if the container has none.
    """

    make: Callable[..., Any]
    add: Callable[[Any, Any], object] | None = None
    put: Callable[[Any, Any, Any], object] | None = None
    restore: Callable[[Any, Any], object] | None = None


def require(is_valid: bool) -> None:
    """Raise TypeError unless the arguments are valid."""
    if not is_valid:
        raise TypeError("invalid arguments")


def calling(
    function: Callable[..., Any], *kinds: tuple[type, ...], optional: int = 0
) -> ValueConstructor:
    """Return a constructor that calls ``function`` with arguments of the given types.

    Args:
        kinds: allowed types of each argument.
        optional: number of trailing arguments that may be missing.
    """

    def make(args: Args, state: Any) -> object:
        require(state is NO_STATE and len(kinds) - optional <= len(args) <= len(kinds))
        require(all(type(arg) in allowed for arg, allowed in zip(args, kinds, strict=False)))
        return function(*args)

    return ValueConstructor(make)


def _set_attributes(instance: Any, state: Any) -> None:
    require(type(state) is dict and all(type(name) is str for name in state))
    vars(instance).update(state)


def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _make_empty(function: Callable[[], Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        require(not args)
        return function()

    return make


def _defaultdict(*args: Any) -> Any:
    require(len(args) <= 1)
    # Any other factory would be called by the first lookup of a missing key.
    is_known = not args or args[0] is None or (isinstance(args[0], type) and args[0] in FACTORIES)
    return collections.defaultdict(*args) if is_known else NotImplemented


def _counter(*args: Any) -> Any:
    require(not args or (len(args) == 1 and type(args[0]) is dict))
    return collections.Counter(*args)


def _deque(*args: Any) -> Any:
    require(len(args) <= 2 and (not args or type(args[0]) in (tuple, list)))
    require(len(args) < 2 or args[1] is None or type(args[1]) is int)
    return collections.deque(*args)


def _set_bytes_io(stream: Any, state: Any) -> None:
    require(
        type(state) is tuple
        and len(state) == 3
        and type(state[0]) is bytes
        and type(state[1]) is int
    )
    # The state is (content, position, attributes or None).
    stream.write(state[0])
    stream.seek(state[1])
    if state[2]:
        _set_attributes(stream, state[2])


def _path(kind: type) -> ValueConstructor:
    def make(args: Args, state: Any) -> object:
        require(state is NO_STATE and all(type(part) is str for part in args))
        return kind(*args)

    return ValueConstructor(make)


def _date(kind: Any) -> ValueConstructor:
    """Return a constructor of dates or times, from bytes or numbers and a time zone."""

    def make(args: Args, state: Any) -> object:
        require(
            state is NO_STATE
            and all(type(arg) in (bytes, int, str, datetime.timezone, type(None)) for arg in args)
        )
        return kind(*args)

    return ValueConstructor(make)


def _timezone(args: Args, state: Any) -> object:
    require(state is NO_STATE and 1 <= len(args) <= 2 and type(args[0]) is datetime.timedelta)
    require(len(args) == 1 or type(args[1]) is str)
    return datetime.timezone(*args)


def _decimal(args: Args, state: Any) -> object:
    require(
        state is NO_STATE and len(args) == 1 and type(args[0]) is str and len(args[0]) <= _MAX_TEXT
    )
    return decimal.Decimal(args[0])


def _fraction(args: Args, state: Any) -> object:
    require(
        state is NO_STATE
        and (tuple(map(type, args)) == (int, int) or tuple(map(type, args)) == (str,))
    )
    require(
        len(args) == 2
        # The pattern excludes exponents: Fraction("1e999999999") would fill the memory.
        or re.fullmatch(rf"-?\d{{1,{_MAX_TEXT}}}(/\d{{1,{_MAX_TEXT}}})?", args[0]) is not None
    )
    return fractions.Fraction(*args)


def _uuid(args: Args, state: Any) -> object:
    require(not args and type(state) is dict and type(state.get("int")) is int)
    return uuid.UUID(int=state["int"])


def _random(args: Args, state: Any) -> object:
    require(all(type(arg) is int for arg in args) and type(state) is tuple)
    generator = random.Random()
    generator.setstate(state)
    return generator


def _or(args: Args, state: Any) -> object:
    """Combine flags: Python 3.11 pickles a combination as a call of ``operator.or_``."""
    if len(args) == 2 and isinstance(args[0], enum.Flag) and type(args[0]) is type(args[1]):
        return args[0] | args[1]
    return NotImplemented


FACTORIES = frozenset(
    {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        list,
        dict,
        set,
        tuple,
        frozenset,
        collections.OrderedDict,
    }
)
"""Classes that may be the factory of a defaultdict."""

_PATHS = {
    "PosixPath": pathlib.PosixPath,
    "Path": pathlib.Path,
    "PurePath": pathlib.PurePath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,  # a WindowsPath cannot be created on other systems
    "PureWindowsPath": pathlib.PureWindowsPath,
}

_INT_OR_NONE = (int, type(None))

CONSTRUCTORS: dict[Name, ValueConstructor | ContainerConstructor] = {
    ("builtins", "set"): ContainerConstructor(_make_empty(set), add=set.add),
    ("builtins", "dict"): ContainerConstructor(_make_empty(dict), put=_set_item),
    ("builtins", "list"): ContainerConstructor(_make_empty(list), add=list.append),
    ("builtins", "complex"): calling(complex, (int, float), (int, float)),
    ("builtins", "slice"): calling(slice, _INT_OR_NONE, _INT_OR_NONE, _INT_OR_NONE),
    ("builtins", "range"): calling(range, (int,), (int,), (int,)),
    ("collections", "OrderedDict"): ContainerConstructor(
        _make_empty(collections.OrderedDict), put=_set_item, restore=_set_attributes
    ),
    ("collections", "defaultdict"): ContainerConstructor(_defaultdict, put=_set_item),
    ("collections", "Counter"): ContainerConstructor(_counter, put=_set_item),
    ("collections", "deque"): ContainerConstructor(_deque, add=collections.deque.append),
    ("argparse", "Namespace"): ContainerConstructor(
        _make_empty(argparse.Namespace), restore=_set_attributes
    ),
    ("types", "SimpleNamespace"): ContainerConstructor(
        _make_empty(types.SimpleNamespace), restore=_set_attributes
    ),
    ("_io", "BytesIO"): ContainerConstructor(_make_empty(io.BytesIO), restore=_set_bytes_io),
    ("io", "BytesIO"): ContainerConstructor(_make_empty(io.BytesIO), restore=_set_bytes_io),
    ("datetime", "date"): _date(datetime.date),
    ("datetime", "time"): _date(datetime.time),
    ("datetime", "datetime"): _date(datetime.datetime),
    ("datetime", "timedelta"): calling(datetime.timedelta, (int,), (int,), (int,), optional=2),
    ("datetime", "timezone"): ValueConstructor(_timezone),
    ("decimal", "Decimal"): ValueConstructor(_decimal),
    ("fractions", "Fraction"): ValueConstructor(_fraction),
    ("uuid", "UUID"): ValueConstructor(_uuid),
    ("random", "Random"): ValueConstructor(_random),
    ("_operator", "or_"): ValueConstructor(_or),
}
# Python 3.13 pickles paths with the module pathlib._local.
CONSTRUCTORS |= {
    (module, name): _path(kind)
    for module in ("pathlib", "pathlib._local")
    for name, kind in _PATHS.items()
}

CLASSES: dict[Name, object] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in FACTORIES},
    **{("builtins", kind.__name__): kind for kind in (object, bytearray, slice, range, type(None))},
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            collections.defaultdict,
            collections.Counter,
            collections.deque,
            argparse.Namespace,
            types.SimpleNamespace,
            decimal.Decimal,
            fractions.Fraction,
            datetime.datetime,
            datetime.date,
            datetime.timedelta,
        )
    },
}
"""Classes that a checkpoint may contain as values."""
