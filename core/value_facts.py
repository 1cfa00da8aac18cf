"""What the numbers of arrays look like: NaN, infinities, and whether all are the same.

The usual block is proven finite by two maxima: the largest pattern as an unsigned integer is the negative number of the
largest magnitude, the largest as a signed one the positive. Only blocks with something in them are counted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.number_kinds import KINDS, NumberKind

if TYPE_CHECKING:
    from core.catalog import StoredArray


@dataclass(slots=True)
class Facts:
    """About the elements of an array.

    Args:
        n_nan, n_infinite: elements that are NaN, infinite; of complex ones, any part.
        first_nan, first_infinite: index of the first one in C order; None without any.
        value: the pattern that all numbers have, as an integer; None where they differ, or there are none.
        is_read: all elements have been seen.
    """

    n_nan: int = 0
    n_infinite: int = 0
    first_nan: int | None = None
    first_infinite: int | None = None
    value: int | None = None
    is_read: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether nothing is NaN or infinite."""
        return self.n_nan == self.n_infinite == 0


_VARIOUS = -1


class ValueObserver:
    """Gathers facts about all floating-point arrays (``core.scan.Observer``).

    Attributes:
        facts: by array name.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Facts] = {}
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
        numbers = _numbers(data, kind)
        top = int(numbers.max())
        facts = self.facts[array.name]
        if facts.value != _VARIOUS:
            self._settle(facts, numbers, top)
        if _is_suspect(numbers, top, kind):
            self._count(facts, numbers, kind, start)

    def _settle(self, facts: Facts, numbers: Any, top: int) -> None:
        """Finds out whether all numbers still are the same."""
        ends = int(numbers[0]), int(numbers[len(numbers) // 2]), int(numbers[-1])
        value = top if ends == (top, top, top) and int(numbers.min()) == top else _VARIOUS
        with self._lock:
            facts.value = value if facts.value in (None, value) else _VARIOUS

    def _count(self, facts: Facts, numbers: Any, kind: NumberKind, start: int) -> None:
        is_nan, is_infinite = _masks(numbers, kind)
        n_nan, first_nan = _counted(is_nan, kind)
        n_infinite, first_infinite = _counted(is_infinite, kind)
        with self._lock:
            facts.n_nan += n_nan
            facts.n_infinite += n_infinite
            facts.first_nan = _earlier(facts.first_nan, first_nan, start)
            facts.first_infinite = _earlier(facts.first_infinite, first_infinite, start)

    def finish(self, array: StoredArray) -> None:
        """See Observer."""
        facts = self.facts[array.name]
        facts.is_read = True
        if facts.value == _VARIOUS:
            facts.value = None


def _numbers(data: memoryview, kind: NumberKind) -> Any:
    import numpy as np

    return np.frombuffer(data, f"<u{kind.n_bytes}")


def _is_suspect(numbers: Any, top: int, kind: NumberKind) -> bool:
    """Whether something may not be finite.

    Args:
        top: the largest pattern, unsigned.
    """
    if kind.nan is not None:
        return top == kind.nan if kind.nan == 0xFF else top >= kind.nan and bool((numbers == kind.nan).any())
    assert kind.first is not None
    sign = 1 << (8 * kind.n_bytes - 1)
    if top < sign:
        return top >= kind.first
    return top >= sign + kind.first or int(numbers.view(f"<i{kind.n_bytes}").max()) >= kind.first


def _masks(numbers: Any, kind: NumberKind) -> tuple[Any, Any]:
    """Which numbers are NaN, and which are infinite."""
    import numpy as np

    if kind.first is None:
        return numbers == kind.nan, np.zeros(len(numbers), bool)
    magnitudes = numbers & numbers.dtype.type((1 << (8 * kind.n_bytes - 1)) - 1)
    if not kind.has_infinity:
        return magnitudes >= kind.first, np.zeros(len(numbers), bool)
    return magnitudes > kind.first, magnitudes == kind.first


def _counted(mask: Any, kind: NumberKind) -> tuple[int, int | None]:
    """Number of elements that a mask of numbers marks, and index of the first."""
    if kind.n_parts > 1:
        mask = mask.reshape(-1, kind.n_parts).any(axis=1)
    n = int(mask.sum())
    return n, int(mask.argmax()) if n else None


def _earlier(known: int | None, found: int | None, start: int) -> int | None:
    if found is None:
        return known
    return start + found if known is None else min(known, start + found)
