"""Values of which planning makes millions.

``@value(frozen=True, slots=True)`` is ``@dataclass(frozen=True, slots=True)`` to the type checker, which refuses to
assign to their fields. The interpreter does not: guarding fields makes a value three times as dear to make, which was
a tenth of the time that a plan of DeepSeek-V3 took. Equality and hash are those of the fields, as of any frozen
dataclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen, slots):
        """See the module's docstring."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["value"]
