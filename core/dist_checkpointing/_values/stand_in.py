"""What a loaded state dict holds in the place of an object whose class is not known here."""

from __future__ import annotations

from typing import Any

from core.dist_checkpointing.dict_utils import diff
from core.pickle.inert import NO_STATE, Global, Inert

NAME = "name"
"""``StandIn.how`` of a class or function that was saved as such."""


class StandIn:
    """An object of a class that this program has not imported, as the checkpoint describes it. It does nothing.

    Megatron's ``args`` hold enumerations of Megatron's own; a checkpoint must be loadable without it. A stand-in can be
    printed, compared and saved again: then the file says what the first one said.

    Attributes:
        how: ``name`` (a class or function itself), or how the object was made: ``reduce``, ``newobj``, ``newobj_ex``
            (see ``core.pickle.inert.Inert``).
        module, name: of the class or function; the name has dots where it is nested.
        args, kwargs: what the class or function was given.
        state: what ``__setstate__`` would get, or ``core.pickle.inert.NO_STATE``.
        items, entries: what was appended, and the pairs that were set.
    """

    __slots__ = ("args", "entries", "how", "items", "kwargs", "module", "name", "state")

    def __init__(
        self,
        how: str,
        module: str,
        name: str,
        *,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        state: object = NO_STATE,
        items: list[object] | None = None,
        entries: list[tuple[object, object]] | None = None,
    ) -> None:
        self.how = how
        self.module = module
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.state = state
        self.items = items or []
        self.entries = entries or []

    def __repr__(self) -> str:
        shown = "" if self.how == NAME else f"({', '.join(f'{part!r:.40}' for part in self.args[:4])})"
        return f"<stand-in for {self.module}.{self.name}{shown}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is StandIn and not any(diff(self._parts(), other._parts()))

    def __hash__(self) -> int:
        return hash((self.how, self.module, self.name))

    def __reduce__(self) -> tuple[Any, ...]:
        return stood_in, self._parts()

    def _parts(self) -> tuple[object, ...]:
        """The arguments of ``stood_in``."""
        state = () if self.state is NO_STATE else (self.state,)
        return self.how, self.module, self.name, self.args, self.kwargs, state, self.items, self.entries


def stood_in(
    how: str,
    module: str,
    name: str,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None,
    state: tuple[object, ...],
    items: list[object],
    entries: list[tuple[object, object]],
) -> StandIn:
    """The stand-in that was pickled, between processes of one job."""
    found = state[0] if state else NO_STATE
    return StandIn(how, module, name, args=args, kwargs=kwargs, state=found, items=items, entries=entries)


def inert_again(*parts: Any) -> object:
    """What the stand-in stands for, inert, out of the arguments of ``stood_in``."""
    found = stood_in(*parts)
    fn = Global(found.module, found.name)
    if found.how == NAME:
        return fn
    made = Inert(found.how, fn, found.args, kwargs=found.kwargs)
    made.items, made.entries, made.state = list(found.items), list(found.entries), found.state
    return made
