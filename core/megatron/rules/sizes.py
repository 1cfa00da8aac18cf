"""Sizes as rules write them: a number, or a sum of products of names (``heads * channels + 4``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class PartSize:
    """A size, in elements.

    Args:
        text: the text of the rule.
        terms: a sum of products of numbers and names.
    """

    text: str
    terms: tuple[tuple[int | str, ...], ...]

    def value(self, sizes: Mapping[str, int]) -> int | None:
        """Return the size, or None if a name in it is not known."""
        factors = [
            [sizes.get(item) if isinstance(item, str) else item for item in term]
            for term in self.terms
        ]
        known_factors = [[item for item in term if item is not None] for term in factors]
        return None if known_factors != factors else sum(map(prod, known_factors))


def parsed_size(text: object) -> PartSize | None:
    """Parse a size of a rule; None if it is not a size."""
    if isinstance(text, int) and not isinstance(text, bool):
        return PartSize(str(text), ((text,),)) if text > 0 else None
    if not isinstance(text, str):
        return None
    terms: list[tuple[int | str, ...]] = []
    for term in text.split("+"):
        factors = [factor.strip() for factor in term.split("*")]
        if not all(
            factor.isidentifier() or re.fullmatch("[1-9][0-9]*", factor) for factor in factors
        ):
            return None
        terms.append(tuple(int(factor) if factor.isdecimal() else factor for factor in factors))
    return PartSize(text, tuple(terms))


@dataclass(frozen=True, slots=True)
class ShapeSize:
    """A size that the shape of a tensor tells.

    Args:
        name: name of the size.
        pattern: searched in the tensor's name.
        axis: axis whose extent is the size.
        args: what it should be by the arguments, or None where they do not say.
    """

    name: str
    pattern: re.Pattern[str]
    axis: int
    args: PartSize | None = None
