"""Compare the places of entries in nested dicts: which keys lead to them, and of which types.

Entries are compared by name, the joined keys, whatever the nesting: ``{"a": {7: …}}`` and
``{"a.7": …}`` are ``a.7`` in a format without dicts. Two paths that give one name, such as those to
1 and ``"1"``, get different ones (``a.1~2``), which another format stores as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from core.pickle.inert import as_mapping
from core.pickle.key_text import class_of_key, describe_key
from core.pickle.nesting import LeafEntry, ListIndex, Path, containers, join_path
from core.values import dataclass
from core.verbs.diff.entries import MAX_FOUND, EntryDiff, shorten_value
from core.verbs.diff.sides import Side


@dataclass(slots=True)
class _Places:
    """The paths in a skeleton.

    Args:
        by_key: key of an entry → its path.
        by_text: joined path → the first path with this text, of an entry or a container in a dict.
    """

    by_key: dict[str, Path] = field(default_factory=dict)
    by_text: dict[str, Path] = field(default_factory=dict)


def diff_places(
    a: Side, b: Side, *, is_wanted: Callable[[str], bool]
) -> tuple[list[EntryDiff], list[str]]:
    """Compare the places of the entries that both sides have.

    Args:
        is_wanted: whether to compare an entry, by its name.

    Returns:
        Entries with keys of different types, and those whose joined paths differ, as one side has
        a name that it got because of a collision, at most ``MAX_FOUND``; and a note on the entries
        whose joined paths agree although keys or nesting differ.

    Raises:
        CorruptError: containers are nested too deeply.
    """
    places_a, places_b = _list_places(a.catalog.skeleton), _list_places(b.catalog.skeleton)
    diffs: list[EntryDiff] = []
    # In formats whose keys are all text they cannot differ in type.
    if not any(side.source.format.has_text_keys for side in (a, b)):
        for text, path in places_a.by_text.items():
            other = places_b.by_text.get(text)
            if other is None or not is_wanted(text):
                continue
            key_a, key_b = path[-1], other[-1]
            if class_of_key(key_a) != class_of_key(key_b):
                keys = (f"key {_key_text(key)} ({class_of_key(key)})" for key in (key_a, key_b))
                diffs.append(EntryDiff(text, "changed", *keys))
    types = {entry.path for entry in diffs}

    n_others = 0
    example = ""
    names_b = b.catalog.tensors.keys() | b.catalog.objects.keys()
    for key in (*a.catalog.tensors, *a.catalog.objects):
        if key not in names_b or not is_wanted(key):
            continue
        # Without containers, the name is the place.
        path, other = places_a.by_key.get(key, (key,)), places_b.by_key.get(key, (key,))
        if _typed(path) == _typed(other):
            continue
        texts = _path_text(path), _path_text(other)
        if join_path(path) != join_path(other):
            diffs.append(EntryDiff(key, "changed", *(f"at {text}" for text in texts)))
            continue
        if types.isdisjoint(join_path(path[:depth]) for depth in range(1, len(path) + 1)):
            n_others += 1
            example = example or f"{key} is {texts[0]} in A and {texts[1]} in B"
    notes = []
    if n_others:
        entries = "1 entry has" if n_others == 1 else f"{n_others:,} entries have"
        notes.append(f"{entries} different keys or nesting under the same name: {example}")
    return diffs[:MAX_FOUND], notes


def _list_places(skeleton: object) -> _Places:
    """List the paths to all entries of dicts and lists."""
    places = _Places()
    for path, node in containers({} if skeleton is None else skeleton, once=True):
        mapping = as_mapping(node)
        if mapping is not None:
            parts = list(mapping.items())
        else:
            assert isinstance(node, (list, tuple))
            parts = [(ListIndex(index), item) for index, item in enumerate(node)]
        for name, item in parts:
            entry = LeafEntry((*path, name), item)
            text = join_path(entry.path)
            if mapping is not None:
                places.by_text.setdefault(text, entry.path)
            # The keys of some formats are not paths at all, such as those of single ranks.
            if entry.key == text or entry.is_altered:
                places.by_key.setdefault(entry.key, entry.path)
    return places


def _typed(path: Path) -> list[tuple[str, str]]:
    """Return the text and the class of each key of a path."""
    return [(describe_key(key), class_of_key(key)) for key in path]


def _path_text(path: Path) -> str:
    """Return a path as Python would write it: ``['state'][0]['step']``."""
    return "".join(f"[{_key_text(key)}]" for key in path)


def _key_text(key: object) -> str:
    """Return a key as Python would write it, if that is short."""
    return shorten_value(key) if isinstance(key, (str, int, float)) else describe_key(key)
