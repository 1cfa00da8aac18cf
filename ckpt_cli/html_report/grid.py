"""Grids of coloured cells: layers × modules, ranks, and what moves between ranks."""

from __future__ import annotations

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class CellFindings:
    """The findings about one rank: the worst severity, and their number as a text."""

    worst: str
    text: str


@dataclass(frozen=True, slots=True)
class GridCell:
    """A cell.

    Args:
        style: classes of its colour and frame.
        tip: its tooltip.
        lines: what else it shows, below its text.
        id: the name of the rank whose findings it leads to.
    """

    text: str
    style: str = ""
    tip: str = ""
    lines: tuple[str, ...] = ()
    id: str = ""
    findings: CellFindings | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of bounded size.

    Args:
        kind: its class: ``ranks``, ``matrix`` or ``heat``.
        title: what its parts have in common, or a sentence about all of them.
        corner: the title of the rows.
        rows: title and cells of each row; None where there is nothing.
        is_cut: a sentence on what is left out; "" if nothing is.
    """

    kind: str
    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[GridCell | None, ...]], ...]
    is_cut: str = ""


@dataclass(frozen=True, slots=True)
class Legend:
    """The legend of a grid: its colours and their meanings.

    Args:
        items: class and meaning of each colour.
    """

    title: str
    items: tuple[tuple[str, str], ...]
