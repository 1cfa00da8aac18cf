"""The stand-in for a loaded object whose class is unknown to this program."""

from __future__ import annotations

from typing import Any

from core.dist_checkpointing.dict_utils import diff
from core.pickle.inert import NO_STATE, Global, Inert

NAME = "name"
"""``StandIn.how`` of a class or function that was saved as such."""


class StandIn:
    """A description of an object whose class this program has not imported; it has no behaviour.

    Megatron's ``args`` hold enumerations of Megatron's own; a checkpoint must be loadable without
    Megatron. A stand-in can be printed, compared and saved again: then the new file describes the
    same object as the first.

    Attributes:
        how: ``name`` (a class or function itself), or how the object was made: ``reduce``,
            ``newobj``, ``newobj_ex`` (see ``core.pickle.inert.Inert``).
        module, name: of the class or function; the name has dots if it is nested.
        args, kwargs: arguments of the class or function.
        state: argument for ``__setstate__``, or ``core.pickle.inert.NO_STATE``.
        items, entries: appended items, and (key, value) pairs that were set.
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
        arguments = (
            "" if self.how == NAME else f"({', '.join(f'{part!r:.40}' for part in self.args[:4])})"
        )
        return f"<stand-in for {self.module}.{self.name}{arguments}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is StandIn and not any(diff(self._parts(), other._parts()))

    def __hash__(self) -> int:
        return hash((self.how, self.module, self.name))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_stand_in, self._parts()

    def _parts(self) -> tuple[object, ...]:
        """Return the arguments of ``rebuild_stand_in``."""
        state = () if self.state is NO_STATE else (self.state,)
        return (
            self.how,
            self.module,
            self.name,
            self.args,
            self.kwargs,
            state,
            self.items,
            self.entries,
        )


def rebuild_stand_in(
    how: str,
    module: str,
    name: str,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None,
    state: tuple[object, ...],
    items: list[object],
    entries: list[tuple[object, object]],
) -> StandIn:
    """Return the stand-in that was pickled between processes of one job."""
    value = state[0] if state else NO_STATE
    return StandIn(
        how, module, name, args=args, kwargs=kwargs, state=value, items=items, entries=entries
    )


def rebuild_inert(*parts: Any) -> object:
    """Return the inert object that a stand-in describes.

    Args:
        parts: arguments of ``rebuild_stand_in``.
    """
    stand_in = rebuild_stand_in(*parts)
    fn = Global(stand_in.module, stand_in.name)
    if stand_in.how == NAME:
        return fn
    inert = Inert(stand_in.how, fn, stand_in.args, kwargs=stand_in.kwargs)
    inert.items, inert.entries, inert.state = (
        list(stand_in.items),
        list(stand_in.entries),
        stand_in.state,
    )
    return inert
