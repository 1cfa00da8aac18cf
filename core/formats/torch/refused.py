"""Notes to the user about what ``torch.load(weights_only=True)`` refuses of a state dict, by path
and class.

The rules of what is refused are those of ``weights_only``. A torch file either keeps such objects
under their classes, as ``torch.save`` wrote them (``WriteOptions.weights_only`` is false), or has
them set aside. Files of other formats that torch loads have those set aside that name classes of
other packages than torch and numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.torch.weights_only import ASIDE_KEY, RefusedKey, refused, set_aside
from core.pickle.inert import Global, Inert, TensorLeaf, walk
from core.pickle.nesting import join_path
from core.pickle.reader import globals_of

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog

_MAX_SHOWN = 20
_IMPORTABLE = sys.stdlib_module_names | {"torch", "numpy"}
_NUMPY = {
    "numpy.core.multiarray._reconstruct": "numpy.ndarray",
    "numpy.core.numeric._frombuffer": "numpy.ndarray",
    "numpy.core.multiarray.scalar": "a numpy scalar",
}
"""Functions that numpy's pickles call → the class that they build."""


def refusal_notes(target: TargetCatalog) -> list[str]:
    """Return a note that names the objects of a torch file that weights_only refuses."""
    objects = {join_path(path) or "the root": value for path, value in refused(target.skeleton)}
    if not objects:
        return []
    names = _listed(objects)
    if target.write.weights_only:
        return [
            f"set aside below {ASIDE_KEY!r}, because torch.load's weights_only mode refuses these objects: {names}"
        ]
    return [
        f"torch.load's weights_only mode refuses these objects: {names}; --weights-only sets them aside"
    ]


def loadable(value: object, *, key: str | None = None, packages: Set[str] = frozenset()) -> object:
    """Return a value so that a loader can read it which imports every class that is named.

    The value is returned as it is if it names only importable classes; otherwise it is set aside.

    Args:
        key: key of the object, None for a dict of several; for the error.
        packages: packages that the loader has in addition to torch and numpy.

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
    values = {key: item.value for key, item in target.objects.items()}
    objects = {
        key: value
        for key, value in values.items()
        if not names_importable(value, packages=packages)
    }
    if not objects:
        return []
    packages_named = {name.module.partition(".")[0] for name in globals_of(list(objects.values()))}
    needed = ", ".join(sorted(packages_named - _IMPORTABLE - packages))
    return [
        f"set aside below {ASIDE_KEY!r}, because loading these objects needs {needed}: {_listed(objects)}"
    ]


def names_importable(value: object, *, packages: Set[str] = frozenset()) -> bool:
    """Return whether an inert value names only Python's, torch's and numpy's classes, or those of
    ``packages``.
    """
    return all(
        name.module.partition(".")[0] in _IMPORTABLE | packages for name in globals_of(value)
    )


def _listed(objects: Mapping[str, object]) -> str:
    """Return the names of some objects as text, each with its class."""
    names = [f"{name} ({class_of(value)})" for name, value in list(objects.items())[:_MAX_SHOWN]]
    rest = f" and {len(objects) - _MAX_SHOWN:,} more" if len(objects) > _MAX_SHOWN else ""
    return ", ".join(names) + rest


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
            return _NUMPY.get(node.class_name.replace("._core.", ".core."), node.class_name)
        if isinstance(node, frozenset):
            return "frozenset"
    return type(value).__name__
