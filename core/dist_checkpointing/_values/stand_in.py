"""Stand-ins for loaded objects whose classes are unknown to the program."""

from __future__ import annotations

from typing import Any

from core.dist_checkpointing.dict_utils import diff
from core.pickle.inert import NO_STATE, Global, Inert

NAME = "name"
"""``StandIn.how`` for a class or function that was itself saved as a value."""


class StandIn:
    """A description, without behaviour, of an object whose class the program does not know.

    Megatron's ``args`` contain enumerations that only Megatron defines, but a checkpoint must be
    loadable without Megatron. A stand-in can be printed, compared and saved again; the new file
    describes the same object as the first.

    Attributes:
        how: ``name`` for a class or function itself; else the kind of call that creates the object:
            ``reduce``, ``newobj`` or ``newobj_ex`` (see ``core.pickle.inert.Inert``).
        module: module of the class or function.
        name: qualified name of the class or function, with dots if it is nested.
        args, kwargs: arguments of the call.
        state: argument for ``__setstate__``, or ``core.pickle.inert.NO_STATE``.
        items: appended items.
        entries: (key, value) pairs that were set.
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
        # diff also compares tensors, for which == has no single result.
        return type(other) is StandIn and not any(diff(self._parts(), other._parts()))

    def __hash__(self) -> int:
        return hash((self.how, self.module, self.name))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_stand_in, self._parts()

    def _parts(self) -> tuple[object, ...]:
        """Return the arguments of ``rebuild_stand_in``."""
        # A tuple, because NO_STATE must be the same object after unpickling, and None is a state.
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
    """Rebuild a stand-in that was pickled, for example between the processes of one job."""
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
