"""The files beside the weights that go with a checkpoint: carried as they are, or made anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.catalog.catalog import AnyCatalog, Catalog


def carried_of(catalog: AnyCatalog) -> dict[str, str]:
    """attrs["carried"]: path → key of a hidden tensor; those without one are left out."""
    found = catalog.attrs.get("carried")
    if not isinstance(found, Mapping):
        return {}
    return {str(path): str(key) for path, key in found.items() if key in catalog.hidden}


def documents_of(catalog: AnyCatalog) -> dict[str, bytes]:
    """attrs["documents"]: path → bytes."""
    found = catalog.attrs.get("documents")
    return {str(path): bytes(data) for path, data in found.items()} if isinstance(found, Mapping) else {}


def with_documents(catalog: Catalog, documents: Mapping[str, bytes]) -> Catalog:
    """A catalog with small files of our own; one takes the place of a carried file of the same path."""
    return without_carried(catalog, documents).with_attrs(documents={**documents_of(catalog), **documents})


def without_carried(catalog: Catalog, paths: Iterable[str]) -> Catalog:
    """A catalog that does not carry the files of those paths."""
    carried = carried_of(catalog)
    gone = {carried.pop(path) for path in list(paths) if path in carried}
    if not gone:
        return catalog
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in gone}
    return replace(catalog, hidden=hidden).with_attrs(carried=carried)
