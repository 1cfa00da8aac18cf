"""The paths of entries in the nested state dict, which ``.metadata`` records as planner_data."""

from __future__ import annotations

from core.catalog.catalog import (
    AnyCatalog,
)
from core.pickle.key_text import text_of
from core.pickle.nesting import ListIndex, entries


def paths_of(catalog: AnyCatalog) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every tensor and object in the nested state dict, by key.

    torch flattens a state dict by joining paths with dots. An entry whose key is not its joined
    path is placed at the root, under its key.
    """
    paths: dict[str, tuple[str | int, ...]] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            path = tuple(
                int(part) if isinstance(part, ListIndex) else text_of(part) for part in entry.path
            )
            if ".".join(map(str, path)) == entry.key and (
                entry.key in catalog.tensors or entry.key in catalog.objects
            ):
                paths[entry.key] = path
    for key in (*catalog.tensors, *catalog.objects):
        paths.setdefault(key, (key,))
    return paths
