"""Resolution of the names in a checkpoint, without importing or calling anything.

Three kinds of names are known: classes in the tables of safe constructors, members of enumerations
in modules that are already imported, and everything that the program registered with
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
