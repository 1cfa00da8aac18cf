"""Find where the pickles of a checkpoint name something: in which file, and under which key.

A name may stand where the reader keeps nothing: among the attributes of a tensor, in the key of a
mapping, in the state of a container, or in what the pickle drops again. Such names are searched for
only when they are refused, to tell users where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from core.catalog.catalog import Catalog
from core.files.store import ReadStore
from core.formats.torch.nested_names import trees_of_stream
from core.pickle.inert import NO_STATE, Global, Inert, Persistent
from core.pickle.key_text import text_of

MOST_PLACES = 100
_METADATA = (".metadata", "common.pt", "metadata.json")


@dataclass(frozen=True, slots=True)
class PickledPlace:
    """A place where a pickle names something.

    Args:
        file: name of the file in the store.
        path: keys from the root, as entries are named; "" for the root itself.
        name: the name that the pickle has there.
    """

    file: str
    path: str
    name: Global

    def entries_at(self, catalog: Catalog) -> list[str]:
        """Return the keys of the entry around the place, or else of the entries below it."""
        keys = [*catalog.tensors, *catalog.objects]
        around = [key for key in keys if key == self.path or self.path.startswith(f"{key}.")]
        return around or [key for key in keys if self.path and key.startswith(f"{self.path}.")]


def find_places(
    names: Collection[Global], store: ReadStore, catalog: Catalog
) -> list[PickledPlace]:
    """Return the first ``MOST_PLACES`` places where a checkpoint's pickles have one of ``names``.

    Names that a pickle drops again have no place.
    """
    arrays = (
        fragment.array
        for key in (*catalog.tensors, *catalog.hidden)
        for fragment in catalog.fragments(key)
    )
    stored = {array.extent.file for array in arrays if array is not None}
    files = sorted(
        stored
        | {name for name in (*_METADATA, store.entry) if name is not None and store.exists(name)}
    )
    places: dict[PickledPlace, None] = {}
    for file in files:
        for tree in trees_of_stream(store, file):
            for path, name in _names_in(tree):
                if name in names:
                    places[PickledPlace(file, path, name)] = None
                if len(places) >= MOST_PLACES:
                    return list(places)
    return list(places)


def _names_in(tree: object) -> Iterator[tuple[str, Global]]:
    """Yield (path, name) for every name of an inert tree; shared parts are visited once.

    A stack replaces recursion, so that deep trees cannot exhaust Python's.
    """
    visited: set[int] = set()
    stack: list[tuple[str, object]] = [("", tree)]
    while stack:
        path, node = stack.pop()
        if type(node) is Global:
            yield path, node
        elif id(node) not in visited:
            children = _children(path, node)
            if children:
                visited.add(id(node))
                stack += reversed(children)


def _children(path: str, node: object) -> list[tuple[str, object]]:
    """Return the parts of a node of an inert tree with their paths, in order."""
    if isinstance(node, dict):
        return _entries(path, node.items())
    if isinstance(node, (list, tuple)):
        return [(_below(path, number), item) for number, item in enumerate(node)]
    if isinstance(node, (set, frozenset)):
        return [(path, item) for item in node]
    if isinstance(node, Persistent):
        return [(path, node.value)]
    if not isinstance(node, Inert):
        return []
    # What an object is made of has no key of its own, and in a container is no part of what it holds.
    parts = (node.fn, *node.args, node.kwargs, None if node.state is NO_STATE else node.state)
    place = _below(path, "<state>") if node.entries or node.items else path
    return [
        *((place, part) for part in parts),
        *_entries(path, node.entries),
        *((_below(path, number), item) for number, item in enumerate(node.items)),
    ]


def _entries(path: str, pairs: Collection[tuple[object, object]]) -> list[tuple[str, object]]:
    """Return keys and values of a mapping, both under the path of the entry."""
    return [(_below(path, key), part) for key, value in pairs for part in (key, value)]


def _below(path: str, key: object) -> str:
    """Return the path of an entry of a container."""
    return f"{path}.{text_of(key)}" if path else text_of(key)
