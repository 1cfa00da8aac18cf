"""Catalogs whose tensors get fragments of a test's choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor


def with_fragments(
    tensors: Mapping[str, Tensor[Any]], fragments_of: Callable[[str], Sequence[Any]]
) -> dict[str, Tensor[Any]]:
    """Return tensors with the fragments that a function returns for their keys."""
    return {
        key: replace(tensor, tiling=partial(fragments_of, key)) for key, tensor in tensors.items()
    }


def replace_fragments(
    catalog: Catalog[Any], fragments_of: Callable[[str], Sequence[Any]]
) -> Catalog[Any]:
    """Return a catalog in which a function returns the fragments of each tensor's key."""
    return replace(
        catalog,
        tensors=with_fragments(catalog.tensors, fragments_of),
        hidden=with_fragments(catalog.hidden, fragments_of),
    )
