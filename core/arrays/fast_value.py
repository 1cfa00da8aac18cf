"""A cheap decorator for values of which planning makes millions.

``@value(frozen=True, slots=True)`` is ``@dataclass(frozen=True, slots=True)`` to the type checker,
which refuses assignments to the fields. The interpreter allows them: guarded fields triple the cost
of making a value, which was a tenth of the time that a plan of DeepSeek-V3 took. Equality and hash
are those of the fields, as of any frozen dataclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen, slots):
        """Return a dataclass decorator that hashes frozen values without guarding their fields."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["value"]
