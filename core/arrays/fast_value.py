"""A decorator for value classes of which planning creates millions of instances.

``@value(frozen=True, slots=True)`` is ``@dataclass(frozen=True, slots=True)`` to the type checker,
which rejects assignments to the fields. The interpreter allows them: guarded fields triple the cost
of creating a value, which took a tenth of the planning time for DeepSeek-V3. Equality and hash are
those of the fields, as in any frozen dataclass.
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
