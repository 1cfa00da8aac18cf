"""The meaning of the names in a checkpoint to this program, without importing or calling anything.

Three kinds of names are known: classes of the tables, members of enumerations in modules that are
already imported, and everything that the program registered with
``torch.serialization.add_safe_globals``.

Source: torch 2.13 ``torch/_weights_only_unpickler.py`` (spelling of registered names); CPython 3.11
to 3.14 ``enum.py`` (a member is pickled as its class and its value, or as an attribute).
"""

from __future__ import annotations

import enum
import sys
from typing import Any

import torch

from core.dist_checkpointing._values import constructors, numpy_values, torch_values
from core.dist_checkpointing._values.constructors import Name
from core.pickle.inert import Global
from core.pickle.names import classify

CLASSES = {**constructors.CLASSES, **numpy_values.CLASSES, **torch_values.CLASSES}


class KnownNames:
    """The names that are known when the object is created."""

    def __init__(self) -> None:
        self._registered: dict[Name, Any] = {}
        for item in torch.serialization.get_safe_globals():
            if isinstance(item, tuple):
                module, _, name = str(item[1]).rpartition(".")
                self._registered[module, name] = item[0]
            else:
                self._registered[item.__module__, item.__qualname__] = item

    def registered(self, fn: Global) -> Any:
        """Return the class or function that the program registered for a name, or None.

        Also None for classes of the tables, which are made by the tables alone, and for Python's
        own means of running code.
        """
        name = fn.module, fn.name
        return None if name in CLASSES or is_attack(fn) else self._registered.get(name)

    def value(self, fn: Global) -> Any:
        """Return the class, enumeration member or other value that a name stands for, or None."""
        value = CLASSES.get((fn.module, fn.name))
        if value is None:
            value = self.registered(fn)
        outer, _, last = fn.name.rpartition(".")
        if value is None and outer:
            kind = _imported_enum(fn.module, outer)
            value = None if kind is None else kind.__members__.get(last)
        return value


def member(fn: Global, value: Any) -> Any:
    """Return the member of the imported enumeration ``fn`` that has a value.

    For a set of flags, it may be several members joined.

    Returns:
        None if ``fn`` is not an imported enumeration, or has no such value.
    """
    kind = _imported_enum(fn.module, fn.name)
    if kind is None:
        return None
    for candidate in kind.__members__.values():
        if type(candidate._value_) is type(value) and candidate._value_ == value:
            return candidate
    return _join_flags(kind, value) if issubclass(kind, enum.Flag) and type(value) is int else None


def is_attack(fn: Global) -> bool:
    """Return whether a name is one of Python's own that run code.

    Modules of the program may have the same names as modules that such attacks use.
    """
    return classify(fn) == "dangerous" and fn.module.partition(".")[0] in sys.stdlib_module_names


def _imported_enum(module: str, name: str) -> Any:
    """Return the enumeration that an imported module calls ``name``, or None.

    No attribute is computed for it: only what is in the module's dictionary counts.
    """
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    return value if isinstance(value, type) and issubclass(value, enum.Enum) else None


def _join_flags(kind: Any, value: int) -> Any:
    """Return the members of a set of flags that make up ``value``, joined; None if they cannot."""
    bits = 0
    flags: Any = None
    for flag in kind.__members__.values():
        if value == 0:
            return flag ^ flag
        if flag._value_ & value == flag._value_:
            bits |= flag._value_
            flags = flag if flags is None else flags | flag
    return flags if bits == value else None
