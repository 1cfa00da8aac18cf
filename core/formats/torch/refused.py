"""Notes to the user on the objects of a state dict that ``torch.load(weights_only=True)`` refuses.

``weights_only`` decides what is refused. A torch file either keeps such objects as instances of
their classes, as ``torch.save`` wrote them (``WriteOptions.weights_only`` is false), or has them
set aside. In files of other formats that torch loads, only those objects are set aside that need
packages other than torch and numpy.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.torch.weights_only import (
    ASIDE_KEY,
    RefusedKey,
    list_endless_keys,
    refused,
    set_aside,
)
from core.pickle.inert import Global, Inert, TensorLeaf, walk
from core.pickle.names import globals_of
from core.pickle.nesting import join_path

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog

_MAX_SHOWN = 20
"""Maximum number of objects that a note names."""
_IMPORTABLE = sys.stdlib_module_names | {"torch", "numpy"}
_NUMPY = {
    "numpy.core.multiarray._reconstruct": "numpy.ndarray",
    "numpy.core.numeric._frombuffer": "numpy.ndarray",
    "numpy.core.multiarray.scalar": "a numpy scalar",
}
"""Function that numpy's pickles call → name of what it builds, for notes."""


def refusal_notes(target: TargetCatalog) -> list[str]:
    """Return a note that names the objects in a torch file that weights_only refuses."""
    objects = {join_path(path) or "the root": value for path, value in refused(target.skeleton)}
    if not objects:
        return []
    names = _listed(objects)
    refusal = f"torch.load's weights_only mode refuses these objects: {names}"
    if target.write.weights_only:
        return [f"set aside below {ASIDE_KEY!r}, because {refusal}"]
    endless = list_endless_keys(target.skeleton)
    if endless:
        options = " ".join(f"--exclude {shlex.quote(key)}" for key in endless[:_MAX_SHOWN])
        return [
            f"{refusal}; --weights-only cannot set those aside that contain themselves: {options}"
        ]
    return [f"{refusal}; --weights-only sets them aside"]


def loadable(value: object, *, key: str | None = None, packages: Set[str] = frozenset()) -> object:
    """Return a value in a form that a loader can read which imports every class in a pickle.

    A value that names only importable classes stays as it is; any other is set aside.

    Args:
        key: key of the object, for the error; None for a dict of several objects.
        packages: packages that are installed for the loader in addition to torch and numpy.

    Raises:
        UnsupportedError: the value must be set aside, but contains itself.
    """
    if names_importable(value, packages=packages):
        return value
    try:
        return set_aside(value)
    except UnsupportedError as err:
        err.key = key or err.key
        raise


def aside_notes(target: TargetCatalog, *, packages: Set[str] = frozenset()) -> list[str]:
    """Return a note that names the objects that ``loadable`` sets aside."""
    objects = {
        key: item.value
        for key, item in target.objects.items()
        if not names_importable(item.value, packages=packages)
    }
    if not objects:
        return []
    packages_named = {name.module.partition(".")[0] for name in globals_of(list(objects.values()))}
    needed = ", ".join(sorted(packages_named - _IMPORTABLE - packages))
    reason = f"because loading these objects needs {needed}: {_listed(objects)}"
    return [f"set aside below {ASIDE_KEY!r}, {reason}"]


def names_importable(value: object, *, packages: Set[str] = frozenset()) -> bool:
    """Return whether an inert value names only classes that a loader can import.

    These are the classes from Python's standard library, torch, numpy and ``packages``.
    """
    return all(
        name.module.partition(".")[0] in _IMPORTABLE | packages for name in globals_of(value)
    )


def _listed(objects: Mapping[str, object]) -> str:
    """Return the names of the objects as text, each with its class, shortened if they are many."""
    names = [f"{name} ({class_of(value)})" for name, value in list(objects.items())[:_MAX_SHOWN]]
    ending = f" and {len(objects) - _MAX_SHOWN:,} more" if len(objects) > _MAX_SHOWN else ""
    return ", ".join(names) + ending


def class_of(value: object) -> str:
    """Return the class of an inert value, or of the first object in it that is not plain."""
    if isinstance(value, RefusedKey):
        return (
            f"its key is {'a tensor' if isinstance(value.key, TensorLeaf) else class_of(value.key)}"
        )
    for node in walk(value):
        if isinstance(node, Global):
            return str(node)
        if isinstance(node, Inert):
            # numpy 2 renamed numpy.core to numpy._core.
            return _NUMPY.get(node.class_name.replace("._core.", ".core."), node.class_name)
        if isinstance(node, frozenset):
            return "frozenset"
    return type(value).__name__
