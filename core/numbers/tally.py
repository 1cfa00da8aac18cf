"""What was found of one tensor so far: the same whatever the order in which threads and ranks add to it.

Sums over a tensor are kept exactly, and rounded at the end: floating-point addition in any order is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

from core.numbers.difference import Values

_DIGITS = 1074
"""Binary places of the smallest float64."""


@dataclass(slots=True)
class ExactSum:
    """A sum of float64 numbers, rounded only when it is read.

    Args:
        units: the finite ones, in units of 2^-1074.
        odd: the sum of those that are not finite.
    """

    units: int = 0
    odd: float = 0.0

    def add(self, number: float) -> None:
        """Takes a number."""
        if isfinite(number):
            numerator, denominator = number.as_integer_ratio()
            self.units += numerator << (_DIGITS + 1 - denominator.bit_length())
        else:
            self.odd += number

    def join(self, other: ExactSum) -> None:
        """Takes another sum."""
        self.units += other.units
        self.odd += other.odd

    @property
    def value(self) -> float:
        """The float64 next to it."""
        if self.odd:  # an infinity, or NaN
            return self.odd
        try:
            return self.units / (1 << _DIGITS)
        except OverflowError:
            return inf if self.units > 0 else -inf


@dataclass(slots=True)
class Sums:
    """The sums in ``core.numbers.difference.Values`` of runs that are compared in any order."""

    square_a: ExactSum = field(default_factory=ExactSum)
    square_b: ExactSum = field(default_factory=ExactSum)
    product: ExactSum = field(default_factory=ExactSum)
    square_delta: ExactSum = field(default_factory=ExactSum)

    def add(self, values: Values) -> None:
        """Takes those of a run."""
        self.square_a.add(values.square_a)
        self.square_b.add(values.square_b)
        self.product.add(values.product)
        self.square_delta.add(values.square_delta)

    def add_equal(self, square: ExactSum) -> None:
        """Takes the squares of elements that are equal on both sides."""
        for one in (self.square_a, self.square_b, self.product):
            one.join(square)

    def join(self, other: Sums) -> None:
        """Takes those of other runs."""
        self.square_a.join(other.square_a)
        self.square_b.join(other.square_b)
        self.product.join(other.product)
        self.square_delta.join(other.square_delta)

    def write_to(self, values: Values) -> None:
        """Puts them, rounded, into what was found of the tensor."""
        values.square_a = self.square_a.value
        values.square_b = self.square_b.value
        values.product = self.product.value
        values.square_delta = self.square_delta.value


Pair = tuple[int | float | None, int | float | None]
"""Values of A and of B."""


@dataclass(slots=True)
class Tally:
    """What comparing bands of one tensor found.

    Args:
        differs: whether a band differs.
        values: what differs; its sums are only right once ``sums`` are written to it.
        sums: the exact ones.
        is_cast: see ``core.diff.tensor_pass.Compared``; None before a band of two types has been compared.
        first: flat index of the first element that differs, and its values.
    """

    differs: bool = False
    values: Values = field(default_factory=Values)
    sums: Sums = field(default_factory=Sums)
    is_cast: bool | None = None
    first: tuple[int, Pair] | None = None

    def add(self, found: Values, *, start: int, is_cast: bool | None, pair: Pair | None) -> None:
        """Takes a band that differs.

        Args:
            found: what was found in it.
            start: flat index of its first element.
            is_cast: whether the narrower type holds the other's values, rounded; None where that is no question.
            pair: values of its first element that differs, if there is one.
        """
        first = None if found.first is None or pair is None else (start + found.first, pair)
        made = Tally(True, Values(), Sums(), is_cast, first)
        made.values.add(found, start=start)
        made.sums.add(found)
        self.join(made)

    def add_equal(self, n_elements: int, square: float) -> None:
        """Takes a band that is equal bit for bit: its elements, and the sum of their squares."""
        self.values.n_elements += n_elements
        exact = ExactSum()
        exact.add(square)
        self.sums.add_equal(exact)

    def join(self, other: Tally) -> None:
        """Takes what was found of other bands."""
        self.differs |= other.differs
        self.values.add(other.values)
        self.sums.join(other.sums)
        if self.is_cast is None or other.is_cast is None:
            self.is_cast = self.is_cast if other.is_cast is None else other.is_cast
        else:
            self.is_cast = self.is_cast and other.is_cast
        if other.first is not None and (self.first is None or other.first[0] < self.first[0]):
            self.first = other.first
