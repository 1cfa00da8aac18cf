"""Handle the files beside a checkpoint's weights: carried over unchanged, or written anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.catalog.catalog import AnyCatalog, Catalog


def carried_of(catalog: AnyCatalog) -> dict[str, str]:
    """Return path → key of the hidden tensor for the carried files in the catalog."""
    return {path: key for path, key in catalog.carried.items() if key in catalog.hidden}


def with_documents(catalog: Catalog, documents: Mapping[str, bytes]) -> Catalog:
    """Return the catalog with small new files; they replace carried files of the same path."""
    return replace(
        without_carried(catalog, documents), documents={**catalog.documents, **documents}
    )


def without_carried(catalog: Catalog, paths: Iterable[str]) -> Catalog:
    """Return the catalog without some carried files.

    Args:
        paths: paths of the files.
    """
    carried = carried_of(catalog)
    removed = {carried.pop(path) for path in list(paths) if path in carried}
    if not removed:
        return catalog
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in removed}
    return replace(catalog, hidden=hidden, carried=carried)
