"""The files beside the weights that go with a checkpoint: carried as they are, or made anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.catalog.catalog import AnyCatalog, Catalog


def carried_of(catalog: AnyCatalog) -> dict[str, str]:
    """Return path → key of the hidden tensor for the files that are carried; those without a tensor are left out."""
    return {path: key for path, key in catalog.carried.items() if key in catalog.hidden}


def with_documents(catalog: Catalog, documents: Mapping[str, bytes]) -> Catalog:
    """A catalog with small files of our own; one takes the place of a carried file of the same path."""
    return replace(without_carried(catalog, documents), documents={**catalog.documents, **documents})


def without_carried(catalog: Catalog, paths: Iterable[str]) -> Catalog:
    """A catalog that does not carry the files of those paths."""
    carried = carried_of(catalog)
    gone = {carried.pop(path) for path in list(paths) if path in carried}
    if not gone:
        return catalog
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in gone}
    return replace(catalog, hidden=hidden, carried=carried)
