"""Catalogs with tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.engine.catalog.catalog import Catalog


def tied(catalog: Catalog[Any], ties: Mapping[str, str]) -> Catalog[Any]:
    """Return a catalog in which a key of ``ties`` has the tensor of the key that it maps to."""
    tensors = {key: catalog.tensors[ties.get(key, key)] for key in catalog.tensors}
    return replace(catalog, tensors=tensors)
