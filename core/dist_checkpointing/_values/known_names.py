"""What the names in a checkpoint mean to this program, without importing or calling anything.

Three kinds are known: classes of the tables, members of enumerations in modules that are imported already, and what the
program registered with ``torch.serialization.add_safe_globals``.

Source: torch 2.13 ``torch/_weights_only_unpickler.py`` (how registered names are spelled); CPython 3.11 to 3.14
``enum.py`` (a member is pickled as its class and its value, or as an attribute).
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
    """The names as they are known when it is made."""

    def __init__(self) -> None:
        self._registered: dict[Name, Any] = {}
        for item in torch.serialization.get_safe_globals():
            if isinstance(item, tuple):
                module, _, name = str(item[1]).rpartition(".")
                self._registered[module, name] = item[0]
            else:
                self._registered[item.__module__, item.__qualname__] = item

    def registered(self, fn: Global) -> Any:
        """The class or function that the program registered for a name and that may be called, or None.

        Classes of the tables are made by the tables alone, and Python's own means of running code not at all.
        """
        name = fn.module, fn.name
        return None if name in CLASSES or is_attack(fn) else self._registered.get(name)

    def value(self, fn: Global) -> Any:
        """The class, member or other value that a name stands for, or None."""
        found = CLASSES.get((fn.module, fn.name))
        if found is None:
            found = self.registered(fn)
        outer, _, last = fn.name.rpartition(".")
        if found is None and outer:
            kind = _imported_enum(fn.module, outer)
            found = None if kind is None else kind.__members__.get(last)
        return found


def member(fn: Global, value: Any) -> Any:
    """The member of the enumeration ``fn`` that has a value; None if it is no imported one, or has no such value."""
    kind = _imported_enum(fn.module, fn.name)
    if kind is None:
        return None
    for found in kind.__members__.values():
        if type(found._value_) is type(value) and found._value_ == value:
            return found
    return _flags(kind, value) if issubclass(kind, enum.Flag) and type(value) is int else None


def is_attack(fn: Global) -> bool:
    """Whether a name is one of Python's own that run code; modules of the program may be called like those."""
    return classify(fn) == "dangerous" and fn.module.partition(".")[0] in sys.stdlib_module_names


def _imported_enum(module: str, name: str) -> Any:
    """The enumeration that an imported module calls ``name``, or None; no attribute is computed for it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def _flags(kind: Any, value: int) -> Any:
    """The members of a set of flags that make up ``value``, joined; None if there are none such."""
    joined = 0
    made: Any = None
    for found in kind.__members__.values():
        if value == 0:
            return found ^ found
        if found._value_ & value == found._value_:
            joined |= found._value_
            made = found if made is None else made | found
    return made if joined == value else None
