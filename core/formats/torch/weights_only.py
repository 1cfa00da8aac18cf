"""Setting aside what ``torch.load(weights_only=True)`` refuses, and putting it back on reading.

The default of ``torch.load`` is to build nothing but tensors, plain containers and a few others. A
``.pt`` file that holds an ``argparse.Namespace`` or a numpy array cannot be loaded at all, tensors
included. So such objects leave their
places::

    {"model": {…}, "args": Namespace(lr=0.1)}
    {"model": {…}, "__ckpt_inert__": {"version": 1, "entries": [
        {"path": ["args"], "position": 1, "value": {"$new": {"$global": ["argparse",
         "Namespace"]}, …}}]}}

``value`` is spelled by ``core.pickle.plain``. ``position`` is the entry's place in its mapping. In
a list or tuple that also holds tensors or mappings, None holds the place; others are set aside
whole. A dict subclass that is refused (``defaultdict``) leaves its entries in a plain dict, and an
entry with ``keeps_entries`` says what it was. A root that is no mapping stands below
``__ckpt_root__``.

``put_back(set_aside(tree))`` equals ``tree``, save that what was shared between places is then
separate.

Source: torch 2.13 ``torch/_weights_only_unpickler.py`` (``_get_allowed_globals``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.arrays.dtypes import DTYPES
from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import NO_STATE, Global, Inert, Size, TensorLeaf, as_mapping
from core.pickle.nesting import MAX_DEPTH, join_path
from core.pickle.plain import from_plain, to_plain
from core.pickle.reduce import KeyGuard

ASIDE_KEY = "__ckpt_inert__"
ROOT_KEY = "__ckpt_root__"
_VERSION = 1

_SCALARS = frozenset({type(None), bool, float, str, bytes, bytearray, complex, TensorLeaf})
_MAX_INT_BITS = 2039  # LONG1
_ORDERED_DICT = Global("collections", "OrderedDict")
_DEVICE = Global("torch", "device")
_ALLOWED_CALLS = (_DEVICE, Global("collections", "Counter"))
"""Classes that weights_only builds, besides tensors, containers and ordered dicts."""


def set_aside(root: object) -> object:
    """Return the tree without what weights_only refuses; ``root`` itself if nothing is refused.

    Raises:
        UnsupportedError: the root has the reserved key already, or an object contains itself.
    """
    visitor = _AsideVisitor()
    kept = visitor.visit(root, ())
    if not visitor.records:
        return root
    try:
        note = {"version": _VERSION, "entries": to_plain(visitor.records)}
    except UnsupportedError as err:
        err.key = next(
            (join_path(_record_path(record)) for record in visitor.records if _is_endless(record)),
            None,
        )
        raise
    # Add the note below the reserved key, whatever the root is.
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


def _is_endless(record: dict[str, object]) -> bool:
    try:
        to_plain(record)
    except UnsupportedError:
        return True
    return False


def refused(root: object) -> list[tuple[tuple[object, ...], object]]:
    """Return path and value of every object of a tree that ``set_aside`` would put aside.

    What is put aside for its key only has the value ``RefusedKey``.
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


class _Refused:
    """The type of ``_REFUSED``."""


_REFUSED = _Refused()


class _AsideVisitor:
    """Walks a tree once for ``set_aside``.

    Args:
        is_trial: only answer whether something would be set aside.

    Attributes:
        records: entries as in the module's docstring, but before ``to_plain``.
    """

    def __init__(self, *, is_trial: bool = False) -> None:
        self._is_trial = is_trial
        self.records: list[dict[str, object]] = []
        self._clean: set[int] = set()
        self._changed: set[int] = set()
        self._trial: _AsideVisitor | None = None

    def visit(self, node: Any, path: tuple[object, ...]) -> object:
        """Return what stays of ``node``.

        Every container is visited once, so that shared ones cost nothing.
        """
        kind = type(node)
        if kind in _SCALARS or id(node) in self._clean:
            return node
        if kind is int and node.bit_length() <= _MAX_INT_BITS:
            return node
        if kind is Size or (kind is Global and node.module == "torch" and node.name in DTYPES):
            return node
        # A container that was changed at another place is set aside at this one: its entries are recorded there.
        is_new = id(node) not in self._changed and len(path) < MAX_DEPTH
        kept = self._visit_container(node, path) if is_new else _REFUSED
        if kept is node:
            self._clean.add(id(node))
        else:
            self._changed.add(id(node))
        if kept is _REFUSED and not path:
            self._record(path, 0, node)
        return kept

    def _visit_container(self, node: Any, path: tuple[object, ...]) -> object:
        """Return what stays of a container that was not visited before."""
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
        """Return a mapping without the entries that are refused.

        ``node`` itself if it stays as it is.
        """
        kept = []
        is_same = True
        for position, (key, item) in enumerate(entries):
            stays = self.visit(item, (*path, key)) if self.allows_key(key) else _REFUSED
            is_same &= stays is item
            if stays is _REFUSED:
                self._record((*path, key), position, item)
            else:
                kept.append((key, stays))
        if is_same:
            return node
        return _with_entries(node, kept) if isinstance(node, Inert) else dict(kept)

    def _visit_sequence(
        self, node: list[object] | tuple[object, ...], path: tuple[object, ...]
    ) -> object:
        """Return a list or tuple with None in place of refused elements.

        ``node`` itself if it stays as it is.
        """
        if not self._is_trial and not _holds_entries(node):
            return node if self._is_clean(node, path) else _REFUSED
        kept: list[object] = []
        is_same = True
        for index, item in enumerate(node):
            stays = self.visit(item, (*path, index))
            is_same &= stays is item
            if stays is _REFUSED:
                self._record((*path, index), index, item)
            kept.append(None if stays is _REFUSED else stays)
        if is_same:
            return node
        return tuple(kept) if isinstance(node, tuple) else kept

    def _visit_inert(self, node: Inert, path: tuple[object, ...]) -> object:
        """Return what stays of an inert object: all of it, a plain dict of its entries, or
        nothing.
        """
        if node.how == "reduce" and not node.items and node.kwargs is None:
            if node.fn == _ORDERED_DICT and node.args == () and self._has_clean_state(node, path):
                return self._visit_mapping(node, node.entries, path)
            if node.fn in _ALLOWED_CALLS and node.state is NO_STATE and not node.entries:
                return node if self._allows_arguments(node, path) else _REFUSED

        # The entries of other mappings stay in a plain dict; the record says what the dict was.
        if as_mapping(node) is None or not node.entries or node.items:
            return _REFUSED
        shell = _with_entries(node, [])
        self.records.append({"path": list(path), "value": shell, "keeps_entries": True})
        kept = self._visit_mapping(node, list(dict(node.entries).items()), path)
        return dict(kept.entries) if isinstance(kept, Inert) else kept

    def _allows_arguments(self, node: Inert, path: tuple[object, ...]) -> bool:
        """Return whether weights_only builds a ``torch.device`` or a ``Counter`` with these
        arguments.
        """
        if node.fn == _DEVICE:
            return all(type(part) in (str, int) for part in node.args)
        return (
            len(node.args) == 1
            and type(node.args[0]) is dict
            and self._is_clean(node.args[0], path)
        )

    def _has_clean_state(self, node: Inert, path: tuple[object, ...]) -> bool:
        """Return whether an inert object has no state, or a dict in which nothing is refused."""
        return node.state is NO_STATE or (
            type(node.state) is dict and self._is_clean(node.state, path)
        )

    def _is_clean(self, value: object, path: tuple[object, ...]) -> bool:
        """Return whether nothing in ``value``, which lies below ``path``, is refused.

        Nothing is recorded.
        """
        if self._is_trial:
            return self.visit(value, (*path, "")) is value
        if self._trial is None:
            self._trial = _AsideVisitor(is_trial=True)
        return self._trial.visit(value, (*path, "")) is value

    def allows_key(self, key: object) -> bool:
        """Return whether weights_only builds a key of a dict."""
        if isinstance(key, tuple):
            return all(self.allows_key(part) for part in key)
        return not isinstance(key, (bytearray, TensorLeaf, Inert)) and self.visit(key, ("",)) is key

    def _record(self, path: tuple[object, ...], position: int, value: object) -> None:
        self.records.append({"path": list(path), "position": position, "value": value})


def _holds_entries(node: list[object] | tuple[object, ...]) -> bool:
    """Return whether a sequence holds a tensor or a mapping at any depth, and so is not a single
    object.
    """
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
    """The objects to put back at one place of the tree, and below it.

    Args:
        below: mapping key or list index → place.
        value: the object to put here if ``is_object``; the dict subclass that was here if
            ``is_shell``.
        position: position among the entries of the mapping above.
    """

    below: dict[object, _RestorePoint] = field(default_factory=dict)
    value: object = None
    is_object: bool = False
    is_shell: bool = False
    position: int = 0


def put_back(root: object) -> object:
    """Return the tree from which ``set_aside`` made ``root``.

    ``root`` itself if it has no reserved key.

    Raises:
        CorruptError: the reserved entry is not one that ``set_aside`` makes.
    """
    mapping = as_mapping(root)
    if mapping is None or ASIDE_KEY not in mapping:
        return root
    places = _restore_points(mapping[ASIDE_KEY])
    if places.is_object:
        return places.value
    if ROOT_KEY in mapping:
        return _restore(mapping[ROOT_KEY], places)
    kept = {key: item for key, item in mapping.items() if key != ASIDE_KEY}
    if isinstance(root, Inert):
        return _restore(_with_entries(root, list(kept.items())), places)
    return _restore(kept, places)


def _restore_points(note: object) -> _RestorePoint:
    """Return the objects of a reserved entry as a tree of the places that they belong to."""
    if not isinstance(note, dict) or note.get("version") != _VERSION or "entries" not in note:
        raise CorruptError(f"the reserved entry {ASIDE_KEY!r} has an unknown form")
    records = from_plain(note["entries"])
    root = _RestorePoint()
    guard = KeyGuard()
    for record in records if isinstance(records, list) else (None,):
        path = record.get("path") if isinstance(record, dict) else None
        if (
            not isinstance(record, dict)
            or not isinstance(path, list)
            or len(path) > MAX_DEPTH
            or "value" not in record
        ):
            raise CorruptError(f"the reserved entry {ASIDE_KEY!r} is malformed")
        # Walk down the path, creating the places on the way.
        place = root
        for part in path:
            guard.check(part)
            place = place.below.setdefault(part, _RestorePoint())
        place.value = record["value"]
        position = record.get("position", 0)
        place.position = position if type(position) is int else 0
        place.is_shell = record.get("keeps_entries") is True
        place.is_object = not place.is_shell
    return root


def _restore(node: object, place: _RestorePoint) -> object:
    """Return ``node`` with everything put back below it.

    Recursion is as deep as the paths, so bounded.
    """
    mapping = as_mapping(node)
    if mapping is not None:
        # A mapping: restore below its entries, and insert what was set aside.
        entries = [
            (key, _restore(item, place.below[key]) if key in place.below else item)
            for key, item in mapping.items()
        ]
        missing = [
            (below.position, key, below.value)
            for key, below in place.below.items()
            if below.is_object
        ]
        entries = _merge_entries(entries, sorted(missing, key=lambda entry: entry[0]))
        if isinstance(place.value, Inert) and place.is_shell:
            return _with_entries(place.value, entries)
        return _with_entries(node, entries) if isinstance(node, Inert) else dict(entries)
    if isinstance(node, (list, tuple)) and not place.is_shell:
        # A list or tuple: None holds the place of what was set aside.
        items = list(node)
        for index, below in place.below.items():
            if type(index) is not int or not 0 <= index < len(items):
                raise CorruptError(
                    f"the reserved entry {ASIDE_KEY!r} names an element that does not exist"
                )
            items[index] = below.value if below.is_object else _restore(items[index], below)
        return tuple(items) if isinstance(node, tuple) else items
    raise CorruptError(f"the reserved entry {ASIDE_KEY!r} names a container that does not exist")


def _merge_entries(
    entries: list[tuple[object, object]], missing: list[tuple[int, object, object]]
) -> list[tuple[object, object]]:
    """Return the entries with each missing entry at its position."""
    merged: list[tuple[object, object]] = []
    n_taken = 0
    for position, key, value in missing:
        n = min(max(position - len(merged), 0), len(entries) - n_taken)
        merged += entries[n_taken : n_taken + n]
        n_taken += n
        merged.append((key, value))
    return merged + entries[n_taken:]
