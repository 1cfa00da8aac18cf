"""What the numbers of arrays look like: NaN, infinities, and whether all are the same.

The usual block is proven finite by two maxima: the largest pattern as an unsigned integer is the negative number of the
largest magnitude, the largest as a signed one the positive. Only blocks with something in them are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.device.device import VALUES, Device, does
from core.numbers.facts_on_device import counts, extremes
from core.numbers.kinds import KINDS, NumberKind

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray


@dataclass(slots=True)
class Count:
    """Elements of one sort; of complex ones, any part counts.

    Args:
        n: how many.
        first: index of the first one in C order; None without any.
    """

    n: int = 0
    first: int | None = None

    def add(self, n: int, first: int) -> None:
        """Takes some more, ``n`` > 0."""
        self.n += n
        self.first = first if self.first is None else min(self.first, first)

    def join(self, other: Count) -> None:
        """Takes those of other elements of the array."""
        if other.first is not None:
            self.add(other.n, other.first)


@dataclass(slots=True)
class Facts:
    """About the elements of an array.

    Args:
        nan, infinite: what is not finite.
        huge: finite numbers of 2¹⁰⁰ and more.
        value: the pattern that all numbers have, as an integer; None where they differ, or there are none.
        is_read: all elements have been seen.
    """

    nan: Count = field(default_factory=Count)
    infinite: Count = field(default_factory=Count)
    huge: Count = field(default_factory=Count)
    value: int | None = None
    is_read: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether nothing was counted."""
        return self.nan.n == self.infinite.n == self.huge.n == 0


_VARIOUS = -1


class ValueObserver:
    """Gathers facts about all floating-point arrays (``core.scan.observer.Observer``).

    Args:
        device: where numbers are looked at, if it does that kind of work.

    Attributes:
        facts: by array name.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.facts: dict[str, Facts] = {}
        self._device = device if does(device, VALUES) else None
        self._lock = threading.Lock()

    def sees(self, array: StoredArray) -> bool:
        """See Observer: floating-point arrays."""
        if array.dtype not in KINDS:
            return False
        self.facts[array.name] = Facts()
        return True

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """See Observer."""
        kind = KINDS[array.dtype]
        facts = self.facts[array.name]
        if self._device is not None:
            self._feed_device(self._device, facts, data, kind, start)
            return
        numbers = _numbers(data, kind)
        top = int(numbers.max())
        if facts.value != _VARIOUS:
            self._settle(facts, numbers, top)
        if _is_suspect(numbers, top, kind):
            self._count(facts, numbers, kind, start)

    def _feed_device(self, device: Device, facts: Facts, data: memoryview, kind: NumberKind, start: int) -> None:
        found = extremes(device, data, kind)
        self._note_value(facts, found.top if found.least == found.top else _VARIOUS)
        if kind.nan == 0x80 or _may_be_suspect(found.top, kind, most=lambda: found.most):
            for name, (n, first) in counts(device, data, kind).items():
                with self._lock:
                    getattr(facts, name).add(n, start + first)

    def _settle(self, facts: Facts, numbers: Any, top: int) -> None:
        """Finds out whether all numbers still are the same."""
        ends = int(numbers[0]), int(numbers[len(numbers) // 2]), int(numbers[-1])
        self._note_value(facts, top if ends == (top, top, top) and int(numbers.min()) == top else _VARIOUS)

    def _note_value(self, facts: Facts, value: int) -> None:
        """Takes the pattern that all numbers of a run have, or that they differ."""
        with self._lock:
            facts.value = value if facts.value in (None, value) else _VARIOUS

    def _count(self, facts: Facts, numbers: Any, kind: NumberKind, start: int) -> None:
        for name, mask in _masks(numbers, kind).items():
            if kind.n_parts > 1:
                mask = mask.reshape(-1, kind.n_parts).any(axis=1)
            n = int(mask.sum())
            if n:
                with self._lock:
                    getattr(facts, name).add(n, start + int(mask.argmax()))

    def finish(self, array: StoredArray) -> None:
        """See Observer."""
        facts = self.facts[array.name]
        facts.is_read = True
        if facts.value == _VARIOUS:
            facts.value = None

    def state(self) -> dict[str, Facts]:
        """See Observer."""
        return self.facts

    def merge(self, state: dict[str, Facts]) -> None:
        """See Observer."""
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


def _numbers(data: memoryview, kind: NumberKind) -> Any:
    import numpy as np

    return np.frombuffer(data, f"<u{kind.n_bytes}")


def _is_suspect(numbers: Any, top: int, kind: NumberKind) -> bool:
    """Whether something may be to count.

    Args:
        top: the largest pattern, unsigned.
    """
    if kind.nan == 0x80:
        return top >= kind.nan and bool((numbers == kind.nan).any())
    return _may_be_suspect(top, kind, most=lambda: int(numbers.view(f"<i{kind.n_bytes}").max()))


def _may_be_suspect(top: int, kind: NumberKind, *, most: Callable[[], int]) -> bool:
    """See ``_is_suspect``; the single NaN ``80`` is no extreme, and not seen here.

    Args:
        most: gives the largest pattern as a signed integer.
    """
    if kind.nan is not None:
        return top == kind.nan
    least = kind.first if kind.huge is None else kind.huge
    assert least is not None
    sign = 1 << (8 * kind.n_bytes - 1)
    if top < sign:
        return top >= least
    return top >= sign + least or most() >= least


def _masks(numbers: Any, kind: NumberKind) -> dict[str, Any]:
    """Which numbers are of each sort, by the names of ``Facts``."""
    if kind.first is None:
        return {"nan": numbers == kind.nan}
    magnitudes = numbers & numbers.dtype.type((1 << (8 * kind.n_bytes - 1)) - 1)
    if not kind.has_infinity:
        return {"nan": magnitudes >= kind.first}
    found = {"nan": magnitudes > kind.first, "infinite": magnitudes == kind.first}
    if kind.huge is not None:
        found["huge"] = (magnitudes >= kind.huge) & (magnitudes < kind.first)
    return found
