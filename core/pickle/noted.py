"""What is noted while pickles are read: the uses of names, and the pickles themselves.

Whoever opens a checkpoint notes them, also where it turns out to have no pickles; so this module
imports nothing that reads one.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from core.values import dataclass

if TYPE_CHECKING:
    from core.pickle.uses import Use

_noted: ContextVar[set[Use] | None] = ContextVar(
    "uses of names in the pickles that are read", default=None
)
_kept: ContextVar[ReadPickles | None] = ContextVar("pickles that are kept", default=None)


@dataclass(frozen=True, slots=True)
class ReadPickle:
    """A pickle that was read to its end.

    Args:
        uses: everything that the pickle does with names.
        tree: the inert tree, as returned by ``load``.
    """

    uses: frozenset[Use]
    tree: object


class ReadPickles:
    """The pickles of some files, kept so that they need not be read again.

    Args:
        files: labels of the files whose pickles are kept.
    """

    def __init__(self, files: Container[str]) -> None:
        self._files = files
        self._read: dict[str, list[ReadPickle]] = {}
        self._failed: set[str] = set()
        self._has_unkept = False

    def add(self, file: str, pickle: ReadPickle | None) -> None:
        """Record a pickle of a file; None for a pickle that could not be read."""
        if pickle is None:
            self._failed.add(file)
        elif file not in self._files:
            self._has_unkept = True
        else:
            self._read.setdefault(file, []).append(pickle)

    def are_all_of(self, files: Container[str]) -> bool:
        """Return whether every pickle that was read is of these files, and none had an error."""
        is_complete = bool(self._read) and not self._failed and not self._has_unkept
        return is_complete and all(file in files for file in self._read)

    def of(self, file: str) -> tuple[ReadPickle, ...]:
        """Return the pickles of a file; () if it was not read, or a pickle of it had an error."""
        return () if file in self._failed else tuple(self._read.get(file, ()))


@contextmanager
def noting_uses(*, passes_on: bool = True) -> Iterator[set[Use]]:
    """Collect the uses of names in the pickles that this thread reads in the block.

    A tree does not show all of them: a call whose result is popped from the stack, or passed to a
    call that does not keep it, would run in another reader all the same.

    Args:
        passes_on: pass the uses and pickles on to the ``noting_uses`` and ``keeping_pickles``
            around this block.
    """
    uses: set[Use] = set()
    token = _noted.set(uses)
    kept_token = _kept.set(_kept.get() if passes_on else None)
    try:
        yield uses
    finally:
        _kept.reset(kept_token)
        _noted.reset(token)
        if passes_on:
            note_uses(uses)


@contextmanager
def keeping_pickles(files: Container[str]) -> Iterator[ReadPickles]:
    """Keep the pickles of these files that this thread reads in the block."""
    pickles = ReadPickles(files)
    token = _kept.set(pickles)
    try:
        yield pickles
    finally:
        _kept.reset(token)


def note_read(file: str, uses: Iterable[Use], tree: object, *, is_read: bool) -> None:
    """Note a pickle of a file.

    Args:
        file: label of the file.
        uses: what the pickle does with names, as far as it was read.
        tree: its inert tree.
        is_read: the pickle was read to its end.
    """
    note_uses(uses)
    pickles = _kept.get()
    if pickles is not None:
        pickles.add(file, ReadPickle(frozenset(uses), tree) if is_read else None)


def note_uses(uses: Iterable[Use]) -> None:
    """Add uses of names to those that ``noting_uses`` collects."""
    noted = _noted.get()
    if noted is not None:
        noted.update(uses)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch the cyclic garbage collector off in the block.

    The collector takes most of the time while millions of objects are created.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
