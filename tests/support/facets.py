"""Facets of catalogs of which a test knows that they are there, and catalogs without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Coords

FacetT = TypeVar("FacetT")
_FACTS = tuple(
    """
    iteration args common optimizer attributes files notes dropped write facets
    """.split()
)
"""The fields of a catalog that are not its tensors, its objects and where they lie."""


def facet_of(catalog: Catalog, kind: type[FacetT]) -> FacetT:
    """Return the facet of a class, which the catalog must have."""
    facet = catalog.facet(kind)
    assert facet is not None, kind
    return facet


def with_facts(catalog: Catalog, kind: type, **changes: object) -> Catalog:
    """Return the catalog with some fields of a facet changed, which it must have."""
    return catalog.with_facet(replace(facet_of(catalog, kind), **changes))


def ranks_of(catalog: Catalog) -> dict[Coords, tuple[str, Any]]:
    """Return the rank directory and the skeleton of each rank file, by coordinates."""
    return dict(facet_of(catalog, RankFacts).ranks)


def with_facts_of(catalog: Catalog, other: Catalog) -> Catalog:
    """Return the tensors and objects of a catalog with all that another one says beside its own."""
    return replace(catalog, **{name: getattr(other, name) for name in _FACTS})


def without_facts(catalog: Catalog) -> Catalog:
    """Return the catalog with its tensors and objects alone."""
    return with_facts_of(catalog, Catalog("", None, {}))
