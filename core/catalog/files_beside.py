"""Select the other files of a checkpoint directory: copied unchanged, or written by the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.catalog.catalog import AnyCatalog, Catalog
from core.catalog.stored import ArrayT

ADAPTER_CONFIG = "adapter_config.json"
"""The configuration of an adapter that peft wrote."""
FILES_BESIDE = "files beside the weights"
"""The reason for not carrying these files over."""
UNREAD = "other files of the directory"
"""The reason for not carrying files over that no reader opened."""


def carried_of(catalog: AnyCatalog) -> dict[str, str]:
    """Return the carried files of a catalog: path → key of the hidden tensor that is the file."""
    return {path: key for path, key in catalog.carried.items() if key in catalog.hidden}


def with_documents(catalog: Catalog, documents: Mapping[str, bytes]) -> Catalog:
    """Return a copy of a catalog with new small files, which replace carried files of their path.

    Args:
        documents: path → bytes.
    """
    return replace(
        without_carried(catalog, documents), documents={**catalog.documents, **documents}
    )


def without_carried(catalog: Catalog[ArrayT], paths: Iterable[str]) -> Catalog[ArrayT]:
    """Return a copy of a catalog without some carried files.

    Args:
        paths: paths of the files; paths of no carried file are ignored.
    """
    carried = carried_of(catalog)
    removed = {carried.pop(path) for path in list(paths) if path in carried}
    if not removed:
        return catalog
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in removed}
    return replace(catalog, hidden=hidden, carried=carried)
