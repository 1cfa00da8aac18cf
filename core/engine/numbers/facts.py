"""Find NaN, infinities and constant values in floating-point arrays.

The usual block is proven finite by two maxima: the largest pattern as an unsigned integer is the
negative number of the largest magnitude, the largest as a signed integer the positive one. Only
blocks that may contain such elements are examined element by element.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any

from core.engine.device.device import VALUES, Device, does
from core.engine.numbers.facts_on_device import count_on_device, find_extremes
from core.engine.numbers.kinds import KINDS, NumberKind
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray


@dataclass(slots=True)
class ElementCount:
    """Number of elements of one sort, such as NaN; a complex element counts if any part does.

    Args:
        n: number of elements.
        first: index of the first one in C order; None if there are none.
    """

    n: int = 0
    first: int | None = None

    def add(self, n: int, first: int) -> None:
        """Count ``n`` more elements (at least one), the first of them at index ``first``."""
        self.n += n
        self.first = first if self.first is None else min(self.first, first)

    def join(self, other: ElementCount) -> None:
        """Add the count of other elements of the same array."""
        if other.first is not None:
            self.add(other.n, other.first)


@dataclass(slots=True)
class ValueFacts:
    """The facts about the elements of one array.

    Args:
        nan, infinite: elements that are not finite.
        huge: finite elements of 2¹⁰⁰ and more.
        value: the bit pattern that all elements have, as an integer; None if they differ, or if
            there are none.
        is_read: all elements have been examined.
    """

    nan: ElementCount = field(default_factory=ElementCount)
    infinite: ElementCount = field(default_factory=ElementCount)
    huge: ElementCount = field(default_factory=ElementCount)
    value: int | None = None
    is_read: bool = False

    @property
    def is_usual(self) -> bool:
        """True if the array has no NaN, infinite or huge element."""
        return self.nan.n == self.infinite.n == self.huge.n == 0


_VARIOUS = -1
"""``ValueFacts.value`` while elements are still being read, once two of them differ."""


class ValueObserver:
    """Gathers facts about all floating-point arrays (a ``core.engine.scan.observer.Observer``).

    Args:
        device: examines the numbers, if it supports that kind of work.

    Attributes:
        facts: by array name.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.facts: dict[str, ValueFacts] = {}
        self._device = device if does(device, VALUES) else None
        self._lock = threading.Lock()

    def sees(self, array: StoredArray) -> bool:
        """Begin the facts of an array; return True if it is a floating-point array."""
        if array.dtype not in KINDS:
            return False
        self.facts[array.name] = ValueFacts()
        return True

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """Examine the elements of an array from index ``start`` on; see ``Observer.feed``."""
        kind = KINDS[array.dtype]
        facts = self.facts[array.name]
        if self._device is not None:
            self._feed_device(self._device, facts, data, kind, start)
            return
        import numpy as np

        # Check for a constant array, until two elements differ.
        numbers: Any = np.frombuffer(data, f"<u{kind.n_bytes}")
        top = int(numbers.max())
        if facts.value != _VARIOUS:
            # Three elements rule out a constant array in most cases, without another full pass.
            samples = int(numbers[0]), int(numbers[len(numbers) // 2]), int(numbers[-1])
            is_constant = samples == (top, top, top) and int(numbers.min()) == top
            self._note_value(facts, top if is_constant else _VARIOUS)
        # Count NaN, infinite and huge elements only if the maxima leave room for any.
        if _has_countable(numbers, top, kind):
            self._count(facts, numbers, kind, start)

    def _feed_device(
        self, device: Device, facts: ValueFacts, data: memoryview, kind: NumberKind, start: int
    ) -> None:
        """Examine a run like ``feed``, on a device."""
        extremes = find_extremes(device, data, kind)
        self._note_value(facts, extremes.top if extremes.least == extremes.top else _VARIOUS)
        # The pattern 80 is not an extreme, so types in which it is NaN are always counted.
        if kind.nan == 0x80 or _may_have_countable(extremes.top, kind, most=lambda: extremes.most):
            for name, (n, first) in count_on_device(device, data, kind).items():
                with self._lock:
                    getattr(facts, name).add(n, start + first)

    def _note_value(self, facts: ValueFacts, value: int) -> None:
        """Note the pattern that all numbers of a run have, or ``_VARIOUS``."""
        with self._lock:
            facts.value = value if facts.value in (None, value) else _VARIOUS

    def _count(self, facts: ValueFacts, numbers: Any, kind: NumberKind, start: int) -> None:
        """Add the NaN, infinite and huge elements of a run to the facts."""
        for name, mask in _masks(numbers, kind).items():
            # A complex element counts once, even if both of its parts do.
            if kind.n_parts > 1:
                mask = mask.reshape(-1, kind.n_parts).any(axis=1)
            n = int(mask.sum())
            if n:
                with self._lock:
                    getattr(facts, name).add(n, start + int(mask.argmax()))

    def finish(self, array: StoredArray) -> None:
        """Note that all elements of an array have been read."""
        facts = self.facts[array.name]
        # An empty array keeps None; a constant one its pattern.
        facts.is_read = True
        if facts.value == _VARIOUS:
            facts.value = None

    def state(self) -> dict[str, ValueFacts]:
        """Return the facts by array name, to be merged on another rank."""
        return self.facts

    def merge(self, state: dict[str, ValueFacts]) -> None:
        """Add the facts that another rank's observer gathered about other elements."""
        for name, other in state.items():
            facts = self.facts.setdefault(name, other)
            if facts is other:
                continue
            facts.is_read |= other.is_read
            for sort in ("nan", "infinite", "huge"):
                getattr(facts, sort).join(getattr(other, sort))
            if facts.value is None:
                facts.value = other.value
            elif other.value not in (None, facts.value):
                facts.value = _VARIOUS


def _has_countable(numbers: Any, top: int, kind: NumberKind) -> bool:
    """Return True if a run may contain a NaN, an infinity or a huge number.

    Args:
        numbers: the bit patterns, unsigned.
        top: the largest of them.
    """
    if kind.nan == 0x80:
        return top >= kind.nan and bool((numbers == kind.nan).any())
    return _may_have_countable(top, kind, most=lambda: int(numbers.view(f"<i{kind.n_bytes}").max()))


def _may_have_countable(top: int, kind: NumberKind, *, most: Callable[[], int]) -> bool:
    """Return True if the extremes of a run leave room for a NaN, an infinity or a huge number.

    Not for types whose only NaN is the pattern 80: it is not an extreme, so that every element has
    to be examined.

    Args:
        top: the largest pattern, unsigned.
        most: returns the largest pattern as a signed integer.
    """
    if kind.nan is not None:
        return top == kind.nan
    least = kind.first if kind.huge is None else kind.huge
    assert least is not None
    # If no pattern has the sign bit, the largest one is the largest number. Otherwise it is the
    # negative number of the largest magnitude, and ``most`` is needed for the positive ones.
    sign = 1 << (8 * kind.n_bytes - 1)
    if top < sign:
        return top >= least
    return top >= sign + least or most() >= least


def _masks(numbers: Any, kind: NumberKind) -> dict[str, Any]:
    """Return masks of the numbers of each sort, by the field names of ``ValueFacts``."""
    # Without the sign bit, patterns are ordered by magnitude.
    if kind.first is None:
        return {"nan": numbers == kind.nan}
    magnitudes = numbers & numbers.dtype.type((1 << (8 * kind.n_bytes - 1)) - 1)
    if not kind.has_infinity:
        return {"nan": magnitudes >= kind.first}
    masks = {"nan": magnitudes > kind.first, "infinite": magnitudes == kind.first}
    if kind.huge is not None:
        masks["huge"] = (magnitudes >= kind.huge) & (magnitudes < kind.first)
    return masks
