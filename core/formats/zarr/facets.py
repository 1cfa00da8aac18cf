"""Facts about zarr arrays beyond their elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ZarrFacts:
    """A facet (``core.catalog.facets``) of catalogs whose zarr arrays may lack chunks.

    Args:
        unstored: key of a tensor that may lack chunks → True if only the indexes of its shards can
            show it, False if a chunk file is missing.
    """

    unstored: Mapping[str, bool] = field(default_factory=dict)
