"""Setting aside what ``torch.load(weights_only=True)`` refuses, and putting it back on reading.

By default, ``torch.load`` builds nothing but tensors, plain containers and a few other objects. A
``.pt`` file that contains an ``argparse.Namespace`` or a numpy array cannot be loaded at all, not
even its tensors. So such objects are moved to a reserved entry::

    {"model": {…}, "args": Namespace(lr=0.1)}
    {"model": {…}, "__ckpt_inert__": {"version": 1, "entries": [
        {"path": ["args"], "position": 1, "value": {"$new": {"$global": ["argparse",
         "Namespace"]}, …}}]}}

``value`` is spelled by ``core.pickle.plain``. ``position`` is the index of the entry in its
mapping. In a list or tuple that also contains tensors or mappings, None replaces the object; any
other list or tuple is set aside as one object. A dict subclass that is refused (``defaultdict``)
leaves its entries in a plain dict, and the value of a record with ``keeps_entries`` describes the
subclass. A root that is not a mapping is stored below ``__ckpt_root__``.

``put_back(set_aside(tree))`` equals ``tree``, except that an object which the tree contains several
times is a separate one each time.

Source: torch 2.13 ``torch/_weights_only_unpickler.py`` (``_get_allowed_globals``).

Notes to the user name the refused objects. A torch file either keeps such objects as instances of
their classes, as ``torch.save`` wrote them (``WriteOptions.weights_only`` is false), or has them
set aside. In files of other formats that torch loads, only those objects are set aside that need
packages other than torch and numpy.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Set
from dataclasses import field
from typing import TYPE_CHECKING, Any

from core.arrays.dtypes import DTYPES
from core.errors import CorruptError, UnsupportedError, list_some
from core.pickle.fields import int_or_none
from core.pickle.inert import NO_STATE, Global, Inert, Size, TensorLeaf, as_mapping, walk
from core.pickle.names import globals_of
from core.pickle.nesting import MAX_DEPTH, join_path
from core.pickle.plain import from_plain, to_plain
from core.pickle.reduce import KeyGuard
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import TargetCatalog

ASIDE_KEY = "__ckpt_inert__"
ROOT_KEY = "__ckpt_root__"
_VERSION = 1

_SCALARS = frozenset({type(None), bool, float, str, bytes, bytearray, complex, TensorLeaf, Size})
_MAX_INT_BITS = 2039
"""Bits of the largest integer that fits LONG1, the only opcode for long ones that torch reads."""
_ORDERED_DICT = Global("collections", "OrderedDict")
_DEVICE = Global("torch", "device")
_ALLOWED_CALLS = (_DEVICE, Global("collections", "Counter"))
"""Classes that weights_only builds in addition to tensors, containers and ordered dicts."""


def set_aside(root: object) -> object:
    """Move the objects that weights_only refuses to the reserved entry.

    Returns:
        The tree with the reserved entry; ``root`` itself if nothing is refused.

    Raises:
        UnsupportedError: the root has the reserved key already, or an object contains itself.
    """
    visitor = _AsideVisitor()
    kept = visitor.visit(root, ())
    if not visitor.records:
        return root
    # Spell the objects as plain data; an error names the first one that contains itself.
    try:
        note = {"version": _VERSION, "entries": to_plain(visitor.records)}
    except UnsupportedError as err:
        err.key = next(
            (join_path(_record_path(record)) for record in visitor.records if _is_endless(record)),
            None,
        )
        if err.key:
            err.hint = (
                f"drop it with --exclude {shlex.quote(err.key)}, or write a torch file without"
                " --weights-only"
            )
        raise
    # Add them below the reserved key: to the root if it is a mapping, else to a new dict.
    if kept is _REFUSED:
        return {ASIDE_KEY: note}
    mapping = as_mapping(kept)
    if mapping is None:
        return {ROOT_KEY: kept, ASIDE_KEY: note}
    if ASIDE_KEY in mapping or ROOT_KEY in mapping:
        raise UnsupportedError(
            f"the checkpoint uses the reserved key {ASIDE_KEY!r}", hint="rename it with --rename"
        )
    if isinstance(kept, Inert):
        return _with_entries(kept, [*kept.entries, (ASIDE_KEY, note)])
    return {**mapping, ASIDE_KEY: note}


def _record_path(record: dict[str, object]) -> tuple[object, ...]:
    path: Any = record["path"]
    return tuple(path)


def list_endless_keys(root: object) -> list[str]:
    """Return the names of the objects that ``set_aside`` cannot spell: they contain themselves."""
    visitor = _AsideVisitor()
    visitor.visit(root, ())
    return [join_path(_record_path(record)) for record in visitor.records if _is_endless(record)]


def _is_endless(record: dict[str, object]) -> bool:
    """Return whether the object of a record contains itself, so that it cannot be spelled."""
    try:
        to_plain(record)
    except UnsupportedError:
        return True
    return False


def find_refused(root: object) -> list[tuple[tuple[object, ...], object]]:
    """Return path and value of every object of a tree that ``set_aside`` would move.

    An entry that is refused because of its key has the value ``RefusedKey``.
    """
    visitor = _AsideVisitor()
    visitor.visit(root, ())
    objects: list[tuple[tuple[object, ...], object]] = []
    for record in visitor.records:
        path = _record_path(record)
        is_key = bool(path) and not visitor.allows_key(path[-1])
        objects.append((path, RefusedKey(path[-1]) if is_key else record["value"]))
    return objects


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """The key of an entry that weights_only refuses."""

    key: object


_REFUSED = object()
"""Stands for a node that does not stay in the tree."""


class _AsideVisitor:
    """A walk over a tree that separates what weights_only refuses from what it builds.

    Args:
        is_trial: only find out whether something is refused; the records are not needed.

    Attributes:
        records: records as in the module's docstring, but before ``to_plain``.
    """

    def __init__(self, *, is_trial: bool = False) -> None:
        self._is_trial = is_trial
        self.records: list[dict[str, object]] = []
        self._clean: set[int] = set()
        self._changed: set[int] = set()
        self._trial: _AsideVisitor | None = None

    def visit(self, node: Any, path: tuple[object, ...]) -> object:
        """Return the part of ``node`` that stays in the tree, or ``_REFUSED``.

        Every container is visited once, so that shared ones cost nothing.
        """
        if id(node) in self._clean or _is_allowed_leaf(node):
            return node
        # A container that also occurs elsewhere, and was changed there, is refused here: the
        # records of its entries have the other path.
        is_new = id(node) not in self._changed and len(path) < MAX_DEPTH
        kept = self._visit_container(node, path) if is_new else _REFUSED
        if kept is node:
            self._clean.add(id(node))
        else:
            self._changed.add(id(node))
        # Refused entries are recorded by their container; the root has none.
        if kept is _REFUSED and not path:
            self._record(path, 0, node)
        return kept

    def _visit_container(self, node: Any, path: tuple[object, ...]) -> object:
        """Return the part that stays of a container that was not visited before."""
        kind = type(node)
        if kind is dict:
            return self._visit_mapping(node, list(node.items()), path)
        if kind is list or kind is tuple:
            return self._visit_sequence(node, path)
        if kind is set:
            return node if all(self.allows_key(member) for member in node) else _REFUSED
        return self._visit_inert(node, path) if kind is Inert else _REFUSED

    def _visit_mapping(
        self, node: object, entries: list[tuple[object, object]], path: tuple[object, ...]
    ) -> object:
        """Return a mapping without the entries that are refused; ``node`` itself if none is."""
        kept = []
        is_same = True
        for position, (key, item) in enumerate(entries):
            kept_item = self.visit(item, (*path, key)) if self.allows_key(key) else _REFUSED
            is_same &= kept_item is item
            if kept_item is _REFUSED:
                self._record((*path, key), position, item)
            else:
                kept.append((key, kept_item))
        if is_same:
            return node
        return _with_entries(node, kept) if isinstance(node, Inert) else dict(kept)

    def _visit_sequence(
        self, node: list[object] | tuple[object, ...], path: tuple[object, ...]
    ) -> object:
        """Return a list or tuple with None in place of refused elements; ``node`` if none is."""
        # A sequence without tensors and mappings stays or goes as one object.
        if not self._is_trial and not _holds_entries(node):
            return node if self._is_clean(node, path) else _REFUSED
        kept: list[object] = []
        is_same = True
        for index, item in enumerate(node):
            kept_item = self.visit(item, (*path, index))
            is_same &= kept_item is item
            if kept_item is _REFUSED:
                self._record((*path, index), index, item)
            kept.append(None if kept_item is _REFUSED else kept_item)
        if is_same:
            return node
        return tuple(kept) if isinstance(node, tuple) else kept

    def _visit_inert(self, node: Inert, path: tuple[object, ...]) -> object:
        """Return the part that stays of an inert object: all, a dict of its entries, or nothing."""
        if node.how == "reduce" and not node.items and node.kwargs is None:
            if self._allows_ordered_dict(node, path):
                return self._visit_mapping(node, node.entries, path)
            if self._allows_call(node, path):
                return node
        # The entries of other mappings stay, in a plain dict; the record describes the mapping.
        if as_mapping(node) is None or not node.entries or node.items:
            return _REFUSED
        shell = _with_entries(node, [])
        self.records.append({"path": list(path), "value": shell, "keeps_entries": True})
        # Of entries with one key, the last counts.
        kept = self._visit_mapping(node, list(dict(node.entries).items()), path)
        return dict(kept.entries) if isinstance(kept, Inert) else kept

    def _allows_ordered_dict(self, node: Inert, path: tuple[object, ...]) -> bool:
        """Return whether an object is an ``OrderedDict`` that weights_only builds.

        Its entries are not considered. Its state, if it has one, is the dict of its attributes.
        """
        if node.fn != _ORDERED_DICT or node.args != ():
            return False
        return node.state is NO_STATE or (
            type(node.state) is dict and self._is_clean(node.state, path)
        )

    def _allows_call(self, node: Inert, path: tuple[object, ...]) -> bool:
        """Return whether an object is an allowed ``torch.device`` or ``Counter``."""
        if node.fn not in _ALLOWED_CALLS or node.state is not NO_STATE or node.entries:
            return False
        if node.fn == _DEVICE:
            return all(type(part) in (str, int) for part in node.args)
        return (
            len(node.args) == 1
            and type(node.args[0]) is dict
            and self._is_clean(node.args[0], path)
        )

    def _is_clean(self, value: object, path: tuple[object, ...]) -> bool:
        """Return whether nothing in ``value``, which is below ``path``, is refused.

        Nothing is recorded.
        """
        if self._is_trial:
            return self.visit(value, (*path, "")) is value
        if self._trial is None:
            self._trial = _AsideVisitor(is_trial=True)
        return self._trial.visit(value, (*path, "")) is value

    def allows_key(self, key: object) -> bool:
        """Return whether weights_only builds a key of a dict, which must be hashable."""
        if isinstance(key, tuple):
            return all(self.allows_key(part) for part in key)
        return not isinstance(key, (bytearray, TensorLeaf, Inert)) and self.visit(key, ("",)) is key

    def _record(self, path: tuple[object, ...], position: int, value: object) -> None:
        self.records.append({"path": list(path), "position": position, "value": value})


def _is_allowed_leaf(node: Any) -> bool:
    """Return whether weights_only builds a node that is not a container (sizes count as leaves)."""
    kind = type(node)
    if kind is int:
        return node.bit_length() <= _MAX_INT_BITS  # type: ignore[no-any-return]
    if kind is Global:
        return node.module == "torch" and node.name in DTYPES
    return kind in _SCALARS


def _holds_entries(node: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list or tuple contains a tensor or a mapping at any depth."""
    visited: set[int] = set()
    stack = [node]
    while stack:
        for item in stack.pop():
            if isinstance(item, TensorLeaf) or as_mapping(item) is not None:
                return True
            if isinstance(item, (list, tuple)) and id(item) not in visited:
                visited.add(id(item))
                stack.append(item)
    return False


def _with_entries(node: Inert, entries: list[tuple[object, object]]) -> Inert:
    """Return a copy of an inert mapping with other entries."""
    copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
    copy.state, copy.items, copy.entries = node.state, list(node.items), entries
    return copy


@dataclass(slots=True)
class _RestorePoint:
    """The objects to put back at one path of the tree, and below it.

    Args:
        below: mapping key or list index → restore point of that entry.
        value: the object to put at the path if ``is_object``; the dict subclass, without entries,
            that was there if ``is_shell``.
        position: index among the entries of the mapping that contains it.
    """

    below: dict[object, _RestorePoint] = field(default_factory=dict)
    value: object = None
    is_object: bool = False
    is_shell: bool = False
    position: int = 0


def restore_set_aside(root: object) -> object:
    """Move the objects in the reserved entry back to their places; the inverse of ``set_aside``.

    Returns:
        The tree without the reserved entry; ``root`` itself if it has none.

    Raises:
        CorruptError: the reserved entry is not one that ``set_aside`` writes.
    """
    mapping = as_mapping(root)
    if mapping is None or ASIDE_KEY not in mapping:
        return root
    restore_point = _parse_note(mapping[ASIDE_KEY])
    if restore_point.is_object:
        return restore_point.value
    if ROOT_KEY in mapping:
        return _restore(mapping[ROOT_KEY], restore_point)
    kept = {key: item for key, item in mapping.items() if key != ASIDE_KEY}
    if isinstance(root, Inert):
        return _restore(_with_entries(root, list(kept.items())), restore_point)
    return _restore(kept, restore_point)


def _parse_note(note: object) -> _RestorePoint:
    """Parse a reserved entry; return the restore point of the root.

    Raises:
        CorruptError: the reserved entry is not one that ``set_aside`` writes.
    """
    if not isinstance(note, dict) or note.get("version") != _VERSION or "entries" not in note:
        raise CorruptError(f"the reserved entry {ASIDE_KEY!r} has an unknown format")
    records = from_plain(note["entries"])
    root = _RestorePoint()
    guard = KeyGuard()
    for record in records if isinstance(records, list) else (None,):
        if not isinstance(record, dict) or "value" not in record:
            raise CorruptError(f"the reserved entry {ASIDE_KEY!r} is malformed")
        path = record.get("path")
        if not isinstance(path, list) or len(path) > MAX_DEPTH:
            raise CorruptError(f"the reserved entry {ASIDE_KEY!r} is malformed")
        # Walk down the path, creating the restore points on the way.
        point = root
        for part in path:
            guard.check(part)
            point = point.below.setdefault(part, _RestorePoint())
        point.value = record["value"]
        point.position = int_or_none(record.get("position")) or 0
        point.is_shell = record.get("keeps_entries") is True
        point.is_object = not point.is_shell
    return root


def _restore(node: object, point: _RestorePoint) -> object:
    """Return ``node`` with the objects of a restore point put back below it.

    The recursion is bounded, as it is as deep as the paths.

    Raises:
        CorruptError: the restore point does not fit the tree.
    """
    mapping = as_mapping(node)
    if mapping is not None:
        return _restore_mapping(node, mapping, point)
    if not isinstance(node, (list, tuple)) or point.is_shell:
        raise CorruptError(
            f"the reserved entry {ASIDE_KEY!r} refers to a container that does not exist"
        )
    # In a list or tuple, the objects replace the Nones that were left in their places.
    items = list(node)
    for index, below in point.below.items():
        if type(index) is not int or not 0 <= index < len(items):
            raise CorruptError(
                f"the reserved entry {ASIDE_KEY!r} refers to an element that does not exist"
            )
        items[index] = below.value if below.is_object else _restore(items[index], below)
    return tuple(items) if isinstance(node, tuple) else items


def _restore_mapping(
    node: object, mapping: Mapping[object, object], point: _RestorePoint
) -> object:
    """Return a mapping with the objects of a restore point put back among and below its entries.

    Args:
        node: the mapping, which may be inert.
        mapping: its entries.
    """
    # Restore below the entries that stayed.
    entries = [
        (key, _restore(item, point.below[key]) if key in point.below else item)
        for key, item in mapping.items()
    ]
    # Insert each missing entry where it was: its position counts the entries before it.
    missing = [(key, below) for key, below in point.below.items() if below.is_object]
    merged: list[tuple[object, object]] = []
    n_taken = 0
    for key, below in sorted(missing, key=lambda entry: entry[1].position):
        n = min(max(below.position - len(merged), 0), len(entries) - n_taken)
        merged += entries[n_taken : n_taken + n]
        n_taken += n
        merged.append((key, below.value))
    merged += entries[n_taken:]
    # A plain dict that stands for a dict subclass becomes an instance of it again.
    if isinstance(point.value, Inert) and point.is_shell:
        return _with_entries(point.value, merged)
    return _with_entries(node, merged) if isinstance(node, Inert) else dict(merged)


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
    objects = {
        join_path(path) or "the root": value for path, value in find_refused(target.skeleton)
    }
    if not objects:
        return []
    names = _listed(objects)
    if target.write.weights_only:
        note = "torch.load's weights_only mode refuses these objects, so they are set aside under"
        return [f"{note} {ASIDE_KEY!r}: {names}"]
    refusal = f"torch.load's weights_only mode refuses these objects: {names}"
    endless = list_endless_keys(target.skeleton)
    if endless:
        options = " ".join(f"--exclude {shlex.quote(key)}" for key in endless[:_MAX_SHOWN])
        limit = "--weights-only cannot set aside objects that contain themselves"
        return [f"{refusal}; {limit}, so drop them with {options}"]
    return [f"{refusal}; use --weights-only to set them aside"]


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
    note = f"loading these objects needs {needed}, so they are set aside under {ASIDE_KEY!r}"
    return [f"{note}: {_listed(objects)}"]


def names_importable(value: object, *, packages: Set[str] = frozenset()) -> bool:
    """Return whether an inert value names only classes that a loader can import.

    These are the classes from Python's standard library, torch, numpy and ``packages``.
    """
    return all(
        name.module.partition(".")[0] in _IMPORTABLE | packages for name in globals_of(value)
    )


def _listed(objects: Mapping[str, object]) -> str:
    """Return the names of the objects as text, each with its class, shortened if they are many."""
    return list_some((f"{name} ({class_of(value)})" for name, value in objects.items()), _MAX_SHOWN)


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
