"""The project's value classes: made cheaply, and shown in a few lines.

``dataclass``: a start makes a hundred of these classes or more, and the standard library compiles
six methods for each: half a millisecond, a quarter of the time of a short command. Here those but
``__init__`` are compiled when they are first called.

To the type checker it is the standard library's decorator, so that it rejects assignments to the
fields of a frozen value. The interpreter allows them: guarded fields triple the cost of creating a
value, which took a tenth of the planning time for DeepSeek-V3.

``shown_briefly``: the interpreter and notebooks show the result of a call by its ``repr``, and a
comparison of a million numbers must not print them. A class says what is worth knowing
(``brief``), with numbers as ``bytes_text`` and its like write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses

    _OPTIONS = {"__repr__": "repr", "__eq__": "eq", "__hash__": "unsafe_hash"}
    """Method → the option of the standard library's decorator that makes it."""

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, eq=True, repr=True):
        """Make a class a dataclass; the arguments are those of ``dataclasses.dataclass``."""
        if cls is None:
            options = {"frozen": frozen, "slots": slots, "kw_only": kw_only, "eq": eq, "repr": repr}
            return lambda cls: dataclass(cls, **options)
        # Python sets __hash__ to None in a class that defines just __eq__.
        own = {name for name in _OPTIONS if vars(cls).get(name) is not None}
        cls = dataclasses.dataclass(cls, repr=False, eq=False, slots=slots, kw_only=kw_only)
        for name, is_wanted in {"__repr__": repr, "__eq__": eq, "__hash__": eq}.items():
            if is_wanted and name not in own:
                is_unhashable = name == "__hash__" and not frozen
                setattr(cls, name, None if is_unhashable else _compiled_when_called(cls, name))
        return cls

    def _compiled_when_called(cls, name):
        """Return a method of a dataclass that the standard library's replaces at the first call."""

        def method(self, *args):
            fields = [(field.name, field.type, field) for field in dataclasses.fields(cls)]
            options = {"init": False, "repr": False, "eq": False, _OPTIONS[name]: True}
            model = dataclasses.make_dataclass(cls.__name__, fields, **options)
            setattr(cls, name, getattr(model, name))
            return getattr(cls, name)(self, *args)

        return method


def changed_fields(value: Any) -> list[str]:
    """Return the names of the fields of a value that differ from their defaults."""
    return [field.name for field in fields(value) if getattr(value, field.name) != field.default]


_MOST_LISTED = 5
"""Maximum number of texts of a list that are shown; the others are counted."""
_MOST_CHARACTERS = 200
"""Maximum length of a line."""


class Brief(NamedTuple):
    """The short form of a result, for ``repr`` and notebooks.

    Args:
        title: the first line.
        facts: names and values of the lines below; an empty name continues the one above.
    """

    title: str
    facts: Sequence[tuple[str, str]]


class _Brief(Protocol):
    def brief(self) -> Brief: ...


Class = TypeVar("Class", bound=type[_Brief])


def shown_briefly(cls: Class) -> Class:
    """Decorate a class with a method ``brief`` to be shown by what that returns."""

    def draw_text(self: _Brief) -> str:
        title, facts = self.brief()
        width = max((len(name) for name, _ in facts), default=0)
        rows = (f"  {name.ljust(width)}  {_shown(value)}" for name, value in facts)
        return "\n".join([_shown(title), *rows])

    def draw_html(self: _Brief) -> str:
        from html import escape

        title, facts = self.brief()
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(_shown(value))}</td></tr>"
            for name, value in facts
        )
        return f"<table><caption>{escape(_shown(title))}</caption>{rows}</table>"

    cls.__repr__ = draw_text  # type: ignore[assignment]
    cls._repr_html_ = draw_html  # type: ignore[attr-defined]
    return cls


def list_facts(name: str, texts: Iterable[object]) -> list[tuple[str, str]]:
    """Return a fact for each of the first texts, and one that counts the others."""
    items = iter(texts)
    first = enumerate(map(str, islice(items, _MOST_LISTED)))
    facts = [("" if number else name, text) for number, text in first]
    n_more = sum(1 for _ in items)
    return [*facts, ("", f"… {n_more:,} more")] if n_more else facts


def _shown(text: str) -> str:
    """Return a text on one line that is not too long, without characters that control a screen."""
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def bytes_text(n_bytes: int) -> str:
    """Format a size with three digits: ``512 B``, ``1.21 KiB``, ``3.05 GiB``."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    # 999.5 KiB would be rounded to four digits, "1000 KiB": it is 0.98 MiB.
    value = float(n_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 999.5 or unit == "PiB":
            break
    return f"{_three_digits(value)} {unit}"


def count_text(count: int) -> str:
    """Format a count with three digits and powers of a thousand: ``950``, ``187 K``, ``1.24 B``."""
    if count < 10_000:
        return str(count)
    value = float(count)
    for unit in ("K", "M", "B", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    """Format a value below 1000; the limits are those where rounding adds a digit."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def seconds_text(seconds: float) -> str:
    """Format a duration: ``0.42 s``, ``38 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def n_text(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count with its noun: ``1 tensor``, ``12,345 tensors``, ``2 boxes``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


__all__ = [
    "Brief",
    "bytes_text",
    "changed_fields",
    "count_text",
    "dataclass",
    "list_facts",
    "n_text",
    "seconds_text",
    "shown_briefly",
]
