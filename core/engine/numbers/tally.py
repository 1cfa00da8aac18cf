"""Add up the differences in one tensor, with the same result in any order of threads and ranks.

Sums over a tensor are kept exactly and rounded at the end, because the result of floating-point
addition depends on its order.
"""

from __future__ import annotations

from dataclasses import field
from math import inf, isfinite

from core.engine.numbers.difference import ValueDifference
from core.values import dataclass

_DIGITS = 1074
"""Binary digits after the point of the smallest positive float64."""


@dataclass(slots=True)
class ExactSum:
    """A sum of float64 numbers, rounded only when it is read.

    Args:
        units: the sum of the finite numbers, in units of 2^-1074.
        non_finite: the sum of the infinities and NaNs.
    """

    units: int = 0
    non_finite: float = 0.0

    def add(self, number: float) -> None:
        """Add a number."""
        if isfinite(number):
            # The denominator is a power of two of at most 2^1074, so the shift is exact.
            numerator, denominator = number.as_integer_ratio()
            self.units += numerator << (_DIGITS + 1 - denominator.bit_length())
        else:
            self.non_finite += number

    def join(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.non_finite += other.non_finite

    @property
    def value(self) -> float:
        """The float64 nearest to the sum."""
        if self.non_finite:  # an infinity, or NaN
            return self.non_finite
        try:
            return self.units / (1 << _DIGITS)
        except OverflowError:
            return inf if self.units > 0 else -inf


@dataclass(slots=True)
class Sums:
    """Exact counterparts of the sums in ``core.engine.numbers.difference.ValueDifference``."""

    square_a: ExactSum = field(default_factory=ExactSum)
    square_b: ExactSum = field(default_factory=ExactSum)
    product: ExactSum = field(default_factory=ExactSum)
    square_delta: ExactSum = field(default_factory=ExactSum)

    def add(self, values: ValueDifference) -> None:
        """Add the sums of a run."""
        self.square_a.add(values.square_a)
        self.square_b.add(values.square_b)
        self.product.add(values.product)
        self.square_delta.add(values.square_delta)

    def add_equal(self, square: ExactSum) -> None:
        """Add the sum of the squares of elements that are equal on both sides."""
        for total in (self.square_a, self.square_b, self.product):
            total.join(square)

    def join(self, other: Sums) -> None:
        """Add the sums of other runs."""
        self.square_a.join(other.square_a)
        self.square_b.join(other.square_b)
        self.product.join(other.product)
        self.square_delta.join(other.square_delta)

    def write_to(self, values: ValueDifference) -> None:
        """Set the sums of ``values`` to these, rounded."""
        values.square_a = self.square_a.value
        values.square_b = self.square_b.value
        values.product = self.product.value
        values.square_delta = self.square_delta.value


Pair = tuple[int | float | None, int | float | None]
"""An element's values in A and in B."""


@dataclass(slots=True)
class Tally:
    """The differences found in the bands of one tensor.

    Args:
        differs: a band differs.
        values: the differences; its sums are right only after ``sums.write_to(values)``.
        sums: the exact sums.
        is_cast: the narrower type contains the other's values, rounded, as in ``core.verbs.diff``'s
            ``ComparedTensor``; None before a band of two types was compared.
        first: flat index of the first element that differs, and its values.
    """

    differs: bool = False
    values: ValueDifference = field(default_factory=ValueDifference)
    sums: Sums = field(default_factory=Sums)
    is_cast: bool | None = None
    first: tuple[int, Pair] | None = None

    def add(
        self, result: ValueDifference, *, start: int, is_cast: bool | None, pair: Pair | None
    ) -> None:
        """Add a band that differs.

        Args:
            result: its differences.
            start: flat index of its first element.
            is_cast: the narrower type contains the other's values, rounded; None for bands of
                one type.
            pair: values of its first element that differs, if any.
        """
        first = None if result.first is None or pair is None else (start + result.first, pair)
        band = Tally(True, ValueDifference(), Sums(), is_cast, first)
        band.values.add(result, start=start)
        band.sums.add(result)
        self.join(band)

    def add_equal(self, n_elements: int, square: float) -> None:
        """Add a band that is equal bit for bit.

        Args:
            n_elements: elements of the band.
            square: the sum of their squares.
        """
        self.values.n_elements += n_elements
        exact = ExactSum()
        exact.add(square)
        self.sums.add_equal(exact)

    def join(self, other: Tally) -> None:
        """Add the differences found in other bands."""
        self.differs |= other.differs
        self.values.add(other.values)
        self.sums.join(other.sums)
        # One band that is not a cast decides; None stands for "not compared" and decides nothing.
        if self.is_cast is None or other.is_cast is None:
            self.is_cast = self.is_cast if other.is_cast is None else other.is_cast
        else:
            self.is_cast = self.is_cast and other.is_cast
        if other.first is not None and (self.first is None or other.first[0] < self.first[0]):
            self.first = other.first
