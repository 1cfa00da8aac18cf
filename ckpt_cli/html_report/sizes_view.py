"""The treemap of a checkpoint, drawn for wide and for narrow screens."""

from __future__ import annotations

from ckpt_cli.html_report.treemap import Treemap, draw_treemap
from core.pictures.sizes import SizeNode
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class SizeGroup:
    """The bytes of the model or of the optimizer, for the legend."""

    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SizesView:
    """Two drawings of the same sizes, and their legend."""

    groups: tuple[SizeGroup, ...]
    wide: Treemap
    narrow: Treemap


def sizes_view(sizes: tuple[SizeNode, SizeNode]) -> SizesView | None:
    """Draw the sizes of the model and of the optimizer; return None without any bytes."""
    roots = [
        (name, root)
        for name, root in zip(("model", "optimizer"), sizes, strict=True)
        if root.n_bytes
    ]
    if not roots:
        return None
    return SizesView(
        tuple(SizeGroup(name, root.n_bytes) for name, root in roots),
        draw_treemap(roots, width=1120, height=440),
        draw_treemap(roots, width=360, height=460),
    )
