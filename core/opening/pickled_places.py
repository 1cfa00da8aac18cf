"""Where the pickles of a checkpoint name something: in which file, and under which key.

A name may stand where the reader keeps nothing: among the attributes of a tensor, in the key of a mapping, in the state
of a container, or in what the pickle drops again. It is looked for only when it is refused, to tell users where.
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
        file: name in the store.
        path: keys from the root, as entries are named; "" for the root itself.
        name: what is named there.
    """

    file: str
    path: str
    name: Global

    def entries_at(self, catalog: Catalog) -> list[str]:
        """Return the keys of the entries that it belongs to: one around it, or those below it."""
        keys = [*catalog.tensors, *catalog.objects]
        around = [key for key in keys if key == self.path or self.path.startswith(f"{key}.")]
        return around or [key for key in keys if self.path and key.startswith(f"{self.path}.")]


def places_of(names: Collection[Global], store: ReadStore, catalog: Catalog) -> list[PickledPlace]:
    """Return the first ``MOST_PLACES`` where the pickles of a checkpoint's files name one of ``names``, in order.

    Names that a pickle drops again have none.
    """
    arrays = (fragment.array for key in (*catalog.tensors, *catalog.hidden) for fragment in catalog.fragments(key))
    stored = {array.extent.file for array in arrays if array is not None}
    files = sorted(stored | {name for name in (*_METADATA, store.entry) if name is not None and store.exists(name)})
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
    """Yield every name of an inert tree with its path; without recursion, shared parts once."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", tree)]
    while stack:
        path, node = stack.pop()
        if type(node) is Global:
            yield path, node
            continue
        if not isinstance(node, (dict, list, tuple, set, frozenset, Inert, Persistent)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            stack += _entries(path, node.items())
        elif isinstance(node, (list, tuple)):
            stack += [(_below(path, number), item) for number, item in reversed(list(enumerate(node)))]
        elif isinstance(node, (set, frozenset)):
            stack += [(path, item) for item in node]
        elif isinstance(node, Persistent):
            stack.append((path, node.value))
        else:
            # what an object is made of has no key of its own, and in a container is no part of what it holds
            stack += [(_below(path, number), item) for number, item in reversed(list(enumerate(node.items)))]
            stack += _entries(path, node.entries)
            parts = (node.fn, *node.args, node.kwargs, None if node.state is NO_STATE else node.state)
            place = _below(path, "<state>") if node.entries or node.items else path
            stack += [(place, part) for part in reversed(parts)]


def _entries(path: str, pairs: Collection[tuple[object, object]]) -> list[tuple[str, object]]:
    return [(_below(path, key), part) for key, value in reversed(list(pairs)) for part in (value, key)]


def _below(path: str, key: object) -> str:
    return f"{path}.{text_of(key)}" if path else text_of(key)
