"""What zarr arrays say beyond their elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ZarrFacts:
    """A facet (``core.catalog.facets``) of catalogs of zarr arrays some of which may lack chunks.

    Args:
        unstored: key of a tensor of which chunks may be absent → whether only the indexes of its shards tell.
    """

    unstored: Mapping[str, bool] = field(default_factory=dict)
