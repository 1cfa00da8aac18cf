"""Facts about a PyTorch distributed checkpoint that are not entries of its catalog."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DcpFacts:
    """A facet (``core.catalog.facets``) of catalogs that were read from DCP or torch_dist.

    Args:
        item_files: files that ``.metadata`` lists.
        orphans: keys of items that no entry refers to.
        meta_entries: top-level names in Lightning's ``meta.pt``; DCP output writes these entries to
            such a file again.
        unread: files next to the checkpoint's own that were not read; a note gives the reason.
    """

    item_files: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    meta_entries: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
