"""Check values that somebody else wrote: those of pickles, JSON, TOML and training arguments.

A value may be missing, of another type, or absurdly large. A ``FieldReader`` returns it with its
type, or raises an error such as ``num_experts is '8', not a positive integer``.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from core.errors import CheckpointingException, CorruptError
from core.pickle.inert import Inert, as_mapping
from core.values import dataclass

MAX_RANK = 64
"""Maximum number of axes; torch's own limit is lower."""
_MAX_INT = (1 << 63) - 1
_MAX_NUMBER = sys.float_info.max
T = TypeVar("T")
_MOST_CHARACTERS = 160


class _ShortRepr(reprlib.Repr):
    """``reprlib`` for values of pickles, whose bytes may be long."""

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Return the text of the first bytes."""
        return repr(value[: self.maxstring])


_REPR = _ShortRepr()
_REPR.maxlevel = 3
_REPR.maxtuple = _REPR.maxlist = 16
_REPR.maxstring = _REPR.maxother = 80


@dataclass(frozen=True, slots=True)
class FieldReader:
    """Checks values; its errors say where these come from.

    Every method takes the value and its name for messages.

    Args:
        file, key, rank, hint: those of the errors.
        error: class of the errors.
    """

    file: str | None = None
    key: str | None = None
    rank: str | None = None
    hint: str | None = None
    error: type[CheckpointingException] = CorruptError

    def build_error(self, value: object, name: str, expected: str) -> CheckpointingException:
        """Return the error about a value that is not what is expected."""
        message = f"{name} is {describe_value(value)}, not {expected}"
        return self.error(message, file=self.file, key=self.key, rank=self.rank, hint=self.hint)

    def read_int(
        self,
        value: object,
        name: str,
        *,
        least: int = 0,
        most: int = _MAX_INT,
        expected: str | None = None,
    ) -> int:
        """Return an integer from ``least`` to ``most``; a bool is none."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            usual = "a positive integer" if least == 1 else f"an integer ≥ {least}"
            raise self.build_error(value, name, expected or usual)
        return value

    def read_number(
        self, value: object, name: str, *, least: float = -_MAX_NUMBER, most: float = _MAX_NUMBER
    ) -> float:
        """Return a finite number from ``least`` to ``most``; a bool is none."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]
            raise self.build_error(value, name, "a number")
        return value  # type: ignore[return-value]

    def read_text(self, value: object, name: str) -> str:
        """Return a text, which may be empty."""
        if not isinstance(value, str):
            raise self.build_error(value, name, "a string")
        return value

    def read_mapping(self, value: object, name: str) -> dict[object, object]:
        """Return the entries of a dict or of an inert subclass of it."""
        mapping = as_mapping(value)
        if mapping is None:
            raise self.build_error(value, name, "a dict")
        return mapping

    def read_names(self, value: object, name: str) -> dict[str, object]:
        """Return the entries of a dict whose keys are texts."""
        mapping = as_mapping(value)
        if mapping is None or not all(isinstance(key, str) for key in mapping):
            raise self.build_error(value, name, "a dict with string keys")
        return mapping  # type: ignore[return-value]

    def read_list(
        self, value: object, name: str, *, n: int | None = None, expected: str = "a list"
    ) -> Sequence[object]:
        """Return a list or tuple, of ``n`` items unless that is None."""
        if not isinstance(value, (list, tuple)) or n not in (None, len(value)):
            raise self.build_error(value, name, expected)
        return value

    def read_ints(
        self,
        value: object,
        name: str,
        *,
        n: int | None = None,
        least: int = 0,
        expected: str = "a list of integers",
    ) -> tuple[int, ...]:
        """Return a list of integers ≥ ``least``, as ``read_list``."""
        for item in self.read_list(value, name, n=n, expected=expected):
            if type(item) is not int or not least <= item <= _MAX_INT:
                raise self.build_error(value, name, expected)
        return tuple(value)  # type: ignore[arg-type]

    def read_shape(
        self, value: object, name: str, *, n: int | None = None, least: int = 0
    ) -> tuple[int, ...]:
        """Return a shape, or another position among ``n`` axes, of at most ``MAX_RANK`` numbers."""
        count = f"at most {MAX_RANK}" if n is None else n
        expected = f"a list of {count} integers ≥ {least}"
        if isinstance(value, (list, tuple)) and len(value) > MAX_RANK:
            raise self.build_error(value, name, expected)
        return self.read_ints(value, name, n=n, least=least, expected=expected)

    def read_choices(
        self,
        value: object,
        name: str,
        choices: Collection[T],
        *,
        n: int | None = None,
        least: int = 0,
    ) -> list[T]:
        """Return a list of ``n`` items, or of at least ``least``, each of which is a choice."""
        count = least if n is None else n
        start = f"a list of {count} items, each" if count > 1 else "a list of"
        expected = f"{start} {' or '.join(map(str, choices))}"
        items = self.read_list(value, name, n=n, expected=expected)
        allowed = tuple(choices)  # no set: an item may have no hash
        if len(items) < least or any(item not in allowed for item in items):
            raise self.build_error(value, name, expected)
        return list(items)  # type: ignore[arg-type]


def int_or_none(value: object) -> int | None:
    """Return an integer; None for anything else, a bool too."""
    return value if type(value) is int else None


def find_size(parts: Iterable[Mapping[Any, object]], names: Sequence[str]) -> int | None:
    """Return the first positive integer that a part has under one of the names, or None."""
    values = (int_or_none(part.get(name)) for part in parts for name in names)
    return next((value for value in values if value is not None and value > 0), None)


def text_or_none(value: object) -> str | None:
    """Return a text; None for anything else."""
    return value if isinstance(value, str) else None


def list_or_empty(value: object) -> Sequence[object]:
    """Return a list or tuple; () for anything else."""
    return value if isinstance(value, (list, tuple)) else ()


def mapping_or_empty(value: object) -> Mapping[Any, object]:
    """Return the entries of a dict or of an inert subclass of it; {} for anything else."""
    return as_mapping(value) or {}


def describe_value(value: object) -> str:
    """Return a value as short text, in little time.

    ``repr`` takes for ever where a few bytes of a pickle share lists in lists, and refuses integers
    of thousands of digits.
    """
    if isinstance(value, Inert):
        return f"a {value.class_name}"[:_MOST_CHARACTERS]
    try:
        return _REPR.repr(value)[:_MOST_CHARACTERS]
    except ValueError:
        return "a huge number"
