"""``dataclass``, the decorator of the project's value classes, made cheaper.

A start makes a hundred of these classes or more, and the standard library compiles six methods for
each: half a millisecond, a quarter of the time of a short command. Here those but ``__init__`` are
compiled when they are first called.

To the type checker it is the standard library's decorator, so that it rejects assignments to the
fields of a frozen value. The interpreter allows them: guarded fields triple the cost of creating a
value, which took a tenth of the planning time for DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

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


__all__ = ["changed_fields", "dataclass"]
