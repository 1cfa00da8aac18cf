"""Facts that a DeepSpeed checkpoint states about the run that saved it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZeroFacts:
    """A facet (``core.catalog.facets``) of catalogs that were read from DeepSpeed's files,
    universal ones included.

    Args:
        stage: stage of ZeRO, 0 to 3; None if it is not stated.
        dp: number of data-parallel ranks; None if it is not stated.
    """

    stage: int | None = None
    dp: int | None = None
