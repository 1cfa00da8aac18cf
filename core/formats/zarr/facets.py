"""Facts about zarr arrays beyond their elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ZarrFacts:
    """A facet (``core.catalog.facets``) of catalogs of zarr arrays that may lack chunks.

    Args:
        unstored: key of a tensor that may lack chunks → whether only the indexes of its shards show
            it.
    """

    unstored: Mapping[str, bool] = field(default_factory=dict)
