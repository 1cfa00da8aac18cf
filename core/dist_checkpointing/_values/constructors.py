"""Which classes and functions of a checkpoint are made, and how: the table of safe constructors.

A name that is not in the table, not registered by the program and no enumeration of an imported module is never looked
up, let alone called. What stands here makes plain values only, from arguments that are checked first.

======================  ==============================================================================================
Python                  OrderedDict, defaultdict (of a factory that is in the table), Counter, deque, Namespace,
                        SimpleNamespace, BytesIO, slice, range, complex, bytearray, set, frozenset, paths, dates and
                        times, Decimal, Fraction, UUID, Random
numpy                   arrays, scalars, dtypes, RandomState, Generator (``numpy_values``)
torch                   Size, device, dtype, layout, Generator (``torch_values``); tensors are no calls at all
======================  ==============================================================================================

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
class Made:
    """A value in one step, out of parts that are live already.

    Args:
        make: (arguments, state or NO_STATE) → the value, or NotImplemented if they are not of the usual form. Raises
            TypeError or ValueError for what no such value has.
    """

    make: Callable[[Args, Any], object]


@dataclass(frozen=True, slots=True)
class Filled:
    """A container, made empty and then filled, so that it may contain itself.

    Args:
        make: arguments → the empty container; NotImplemented and errors as for ``Made``.
        add: puts an item in, None if it has none.
        put: sets a key to a value, None if it has no keys.
        restore: takes the state, None if it has none.
    """

    make: Callable[..., Any]
    add: Callable[[Any, Any], object] | None = None
    put: Callable[[Any, Any, Any], object] | None = None
    restore: Callable[[Any, Any], object] | None = None


def fits(wanted: bool) -> None:
    """Raises TypeError unless arguments are as they should be."""
    if not wanted:
        raise TypeError("these arguments do not fit")


def called(function: Callable[..., Any], *kinds: tuple[type, ...], optional: int = 0) -> Made:
    """Calls ``function`` with arguments of the given types.

    Args:
        kinds: the types that are allowed, of each argument.
        optional: how many of the last ones may be absent.
    """

    def make(args: Args, state: Any) -> object:
        fits(state is NO_STATE and len(kinds) - optional <= len(args) <= len(kinds))
        fits(all(type(arg) in allowed for arg, allowed in zip(args, kinds, strict=False)))
        return function(*args)

    return Made(make)


def _with_attributes(made: Any, state: Any) -> None:
    fits(type(state) is dict and all(type(name) is str for name in state))
    vars(made).update(state)


def _put(made: Any, key: Any, value: Any) -> None:
    made[key] = value


def _empty(function: Callable[[], Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        fits(not args)
        return function()

    return make


def _defaultdict(*args: Any) -> Any:
    fits(len(args) <= 1)
    is_known = not args or args[0] is None or (isinstance(args[0], type) and args[0] in FACTORIES)
    return collections.defaultdict(*args) if is_known else NotImplemented


def _counter(*args: Any) -> Any:
    fits(not args or (len(args) == 1 and type(args[0]) is dict))
    return collections.Counter(*args)


def _deque(*args: Any) -> Any:
    fits(len(args) <= 2 and (not args or type(args[0]) in (tuple, list)))
    fits(len(args) < 2 or args[1] is None or type(args[1]) is int)
    return collections.deque(*args)


def _set_bytes_io(made: Any, state: Any) -> None:
    fits(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes and type(state[1]) is int)
    made.write(state[0])
    made.seek(state[1])
    if state[2]:
        _with_attributes(made, state[2])


def _path(kind: type) -> Made:
    def make(args: Args, state: Any) -> object:
        fits(state is NO_STATE and all(type(part) is str for part in args))
        return kind(*args)

    return Made(make)


def _date(kind: Any) -> Made:
    """A date or time, of its bytes or its numbers, and a time zone."""

    def make(args: Args, state: Any) -> object:
        fits(state is NO_STATE and all(type(arg) in (bytes, int, str, datetime.timezone, type(None)) for arg in args))
        return kind(*args)

    return Made(make)


def _timezone(args: Args, state: Any) -> object:
    fits(state is NO_STATE and 1 <= len(args) <= 2 and type(args[0]) is datetime.timedelta)
    fits(len(args) == 1 or type(args[1]) is str)
    return datetime.timezone(*args)


def _decimal(args: Args, state: Any) -> object:
    fits(state is NO_STATE and len(args) == 1 and type(args[0]) is str and len(args[0]) <= _MAX_TEXT)
    return decimal.Decimal(args[0])


def _fraction(args: Args, state: Any) -> object:
    fits(state is NO_STATE and (tuple(map(type, args)) == (int, int) or tuple(map(type, args)) == (str,)))
    fits(len(args) == 2 or re.fullmatch(rf"-?\d{{1,{_MAX_TEXT}}}(/\d{{1,{_MAX_TEXT}}})?", args[0]) is not None)
    return fractions.Fraction(*args)


def _uuid(args: Args, state: Any) -> object:
    fits(not args and type(state) is dict and type(state.get("int")) is int)
    return uuid.UUID(int=state["int"])


def _random(args: Args, state: Any) -> object:
    fits(all(type(arg) is int for arg in args) and type(state) is tuple)
    made = random.Random()
    made.setstate(state)
    return made


def _or(args: Args, state: Any) -> object:
    """Flags of several bits, as Python 3.11 pickles them."""
    if len(args) == 2 and isinstance(args[0], enum.Flag) and type(args[0]) is type(args[1]):
        return args[0] | args[1]
    return NotImplemented


FACTORIES = frozenset(
    {int, float, complex, bool, str, bytes, list, dict, set, tuple, frozenset, collections.OrderedDict}
)
"""Classes that may make the missing values of a defaultdict."""

_PATHS = {
    "PosixPath": pathlib.PosixPath,
    "Path": pathlib.Path,
    "PurePath": pathlib.PurePath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

_INT_OR_NONE = (int, type(None))

CONSTRUCTORS: dict[Name, Made | Filled] = {
    ("builtins", "set"): Filled(_empty(set), add=set.add),
    ("builtins", "dict"): Filled(_empty(dict), put=_put),
    ("builtins", "list"): Filled(_empty(list), add=list.append),
    ("builtins", "complex"): called(complex, (int, float), (int, float)),
    ("builtins", "slice"): called(slice, _INT_OR_NONE, _INT_OR_NONE, _INT_OR_NONE),
    ("builtins", "range"): called(range, (int,), (int,), (int,)),
    ("collections", "OrderedDict"): Filled(_empty(collections.OrderedDict), put=_put, restore=_with_attributes),
    ("collections", "defaultdict"): Filled(_defaultdict, put=_put),
    ("collections", "Counter"): Filled(_counter, put=_put),
    ("collections", "deque"): Filled(_deque, add=collections.deque.append),
    ("argparse", "Namespace"): Filled(_empty(argparse.Namespace), restore=_with_attributes),
    ("types", "SimpleNamespace"): Filled(_empty(types.SimpleNamespace), restore=_with_attributes),
    ("_io", "BytesIO"): Filled(_empty(io.BytesIO), restore=_set_bytes_io),
    ("io", "BytesIO"): Filled(_empty(io.BytesIO), restore=_set_bytes_io),
    ("datetime", "date"): _date(datetime.date),
    ("datetime", "time"): _date(datetime.time),
    ("datetime", "datetime"): _date(datetime.datetime),
    ("datetime", "timedelta"): called(datetime.timedelta, (int,), (int,), (int,), optional=2),
    ("datetime", "timezone"): Made(_timezone),
    ("decimal", "Decimal"): Made(_decimal),
    ("fractions", "Fraction"): Made(_fraction),
    ("uuid", "UUID"): Made(_uuid),
    ("random", "Random"): Made(_random),
    ("_operator", "or_"): Made(_or),
}
CONSTRUCTORS |= {
    (module, name): _path(kind) for module in ("pathlib", "pathlib._local") for name, kind in _PATHS.items()
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
"""Classes that a checkpoint may hold as values."""
