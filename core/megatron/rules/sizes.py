"""Sizes in rules: numbers, or sums of products of numbers and names (``heads * channels + 4``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class PartSize:
    """A size in a rule, in elements.

    Args:
        text: the text in the rule, for messages.
        terms: the terms of the sum, each with the factors of a product: numbers and names.
    """

    text: str
    terms: tuple[tuple[int | str, ...], ...]

    def value(self, sizes: Mapping[str, int]) -> int | None:
        """Return the size, or None if ``sizes`` does not have all names in it."""
        total = 0
        for term in self.terms:
            factors = [sizes.get(item) if isinstance(item, str) else item for item in term]
            numbers = [factor for factor in factors if factor is not None]
            if len(numbers) < len(factors):
                return None
            total += prod(numbers)
        return total


def parsed_size(text: object) -> PartSize | None:
    """Parse a size, a TOML value; None if it is not a size."""
    # TOML has integers and booleans, and a boolean is an int in Python.
    if isinstance(text, int) and not isinstance(text, bool):
        return PartSize(str(text), ((text,),)) if text > 0 else None
    if not isinstance(text, str):
        return None
    terms: list[tuple[int | str, ...]] = []
    for term in text.split("+"):
        factors = [factor.strip() for factor in term.split("*")]
        if not all(map(_is_factor, factors)):
            return None
        terms.append(tuple(int(factor) if factor.isdecimal() else factor for factor in factors))
    return PartSize(text, tuple(terms))


def _is_factor(text: str) -> bool:
    """Return True for a name, or a positive decimal number without leading zeros."""
    return text.isidentifier() or re.fullmatch("[1-9][0-9]*", text) is not None


@dataclass(frozen=True, slots=True)
class ShapeSize:
    """A size that is read from the shape of a tensor.

    Args:
        name: name of the size.
        pattern: searched in the tensor's name.
        axis: axis whose extent is the size.
        args: the same size in terms of training arguments, or None if they do not determine it.
    """

    name: str
    pattern: re.Pattern[str]
    axis: int
    args: PartSize | None = None
