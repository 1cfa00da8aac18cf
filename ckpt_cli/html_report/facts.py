"""Facts that the pages of the terminal show, as values for the templates."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_cli.screen.blocks import Cell
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class FactText:
    """A text next to the name of a fact.

    Args:
        text: the text, not escaped for HTML.
        style: a colour of the terminal; "" for none.
    """

    text: str
    style: str = ""


def named_facts(pairs: Iterable[tuple[str, Cell | str]]) -> list[tuple[str, list[FactText]]]:
    """Return each name with its texts; a pair with an empty name continues the one above."""
    facts: list[tuple[str, list[FactText]]] = []
    for name, value in pairs:
        cell = value if isinstance(value, Cell) else Cell(value)
        text = FactText(cell.text, cell.styles[0] if cell.styles else "")
        if name or not facts:
            facts.append((name, [text]))
        else:
            facts[-1][1].append(text)
    return facts
