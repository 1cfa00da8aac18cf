"""What a checkpoint of DeepSpeed says about the run that saved it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZeroFacts:
    """A facet (``core.catalog.facets``) of catalogs that were read from DeepSpeed's files, universal ones included.

    Args:
        stage: of ZeRO, 0 to 3; None where nothing says.
        dp: number of data-parallel ranks; None where nothing says.
    """

    stage: int | None = None
    dp: int | None = None
