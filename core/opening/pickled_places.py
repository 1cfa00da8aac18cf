"""Find the places where the pickles of a checkpoint refer to a name: the file and the key.

The reader drops some references: among the attributes of a tensor, in the key of a mapping, in the
state of a container, or in values that the pickle itself drops. The places are searched for only
when such a name is refused, so that the error can tell users where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from core.engine.catalog.catalog import Catalog
from core.files.store import ReadStore
from core.formats.torch.nested_names import trees_of_stream
from core.pickle.inert import NO_STATE, Global, Inert, Persistent
from core.pickle.key_text import describe_key
from core.values import dataclass

MOST_PLACES = 100
_METADATA = (".metadata", "common.pt", "metadata.json")


@dataclass(frozen=True, slots=True)
class PickledPlace:
    """A place where a pickle refers to a class or function.

    Args:
        file: name of the file in the store.
        path: keys from the root, dot-joined as in entries; "" for the root itself.
        name: the name of the class or function.
    """

    file: str
    path: str
    name: Global

    def entries_at(self, catalog: Catalog) -> list[str]:
        """Return the keys of the entry that contains the place, or else of the entries below it."""
        keys = [*catalog.tensors, *catalog.objects]
        around = [key for key in keys if key == self.path or self.path.startswith(f"{key}.")]
        return around or [key for key in keys if self.path and key.startswith(f"{self.path}.")]


def find_places(
    names: Collection[Global], store: ReadStore, catalog: Catalog
) -> list[PickledPlace]:
    """Return the first ``MOST_PLACES`` places where a checkpoint's pickles refer to ``names``.

    Names in values that a pickle drops have no place.
    """
    # A pickle can be in any file with tensors, and in the metadata files.
    arrays = (fragment.array for fragment in catalog.all_fragments())
    files = {array.extent.file for array in arrays if array is not None}
    metadata = (name for name in (*_METADATA, store.entry) if name is not None)
    files |= set(filter(store.exists, metadata))
    places: dict[PickledPlace, None] = {}
    for file in sorted(files):
        for tree in trees_of_stream(store, file):
            for path, name in _names_in(tree):
                if name in names:
                    places[PickledPlace(file, path, name)] = None
                if len(places) >= MOST_PLACES:
                    return list(places)
    return list(places)


def _names_in(tree: object) -> Iterator[tuple[str, Global]]:
    """Yield (path, name) for every name in an inert tree, in order; visit shared nodes once."""
    visited: set[int] = set()
    # A stack instead of recursion, so that a deep tree cannot exhaust Python's stack.
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
    """Return (path, child) for each child of a node in an inert tree, in order."""
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
    # The arguments and the state of an object have no key of their own; those of a container must
    # not be mistaken for its entries.
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
    return f"{path}.{describe_key(key)}" if path else describe_key(key)
