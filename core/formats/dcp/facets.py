"""The facts that a PyTorch distributed checkpoint states beyond its entries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DcpFacts:
    """A facet (``core.catalog.facets``) of catalogs that were read from DCP or torch_dist.

    Args:
        item_files: names of the files that ``.metadata`` names.
        orphans: keys of items that no entry refers to.
        meta_entries: names of the root of Lightning's ``meta.pt``; written as DCP they go into such
            a file again.
        unread: files next to the checkpoint's own that were not read, as a note says.
    """

    item_files: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    meta_entries: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
