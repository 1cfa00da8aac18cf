"""Facts that a DeepSpeed checkpoint records about the run that saved it."""

from __future__ import annotations

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ZeroFacts:
    """A facet (``core.catalog.facets``) of catalogs of DeepSpeed checkpoints, also universal ones.

    Args:
        stage: ZeRO stage, 0 to 3; None if it is not recorded.
        dp: number of data-parallel ranks; None if it is not recorded.
    """

    stage: int | None = None
    dp: int | None = None
