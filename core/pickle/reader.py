"""Reads a pickle without running anything: a virtual machine for protocols 0 to 5 that builds inert trees.

No name in a pickle is imported, looked up or called, and ``pickle.Unpickler`` is not used: it allocates whatever a
memo index or a length asks for, and nested tuple keys overflow its stack (docs/facts/safety.md 2.3). A name becomes a
``Global``; REDUCE, NEWOBJ, INST and OBJ become an ``Inert`` with its arguments; BUILD sets its ``state``; SETITEMS and
APPENDS fill its ``entries`` and ``items``. Refused by name: the copyreg extension registry (EXT1/2/4), out-of-band
buffers, text persistent ids.

Bounds: the number of objects is limited in proportion to the length of the pickle (``Limits``), so that memory stays
below 100 MB and 40 times that length; time is linear; nothing recurses. Lengths are compared with the data before
anything is allocated.

Some callables that only make plain values are normalised (``core.pickle.reduce``): ``torch.Size`` to a tuple (the hooks
of torch's files keep it apart), sets, bytes of protocol 2, ``getattr(Class, "name")`` to a longer name, module names of
Python 2.

Source: CPython 3.11 ``pickle.py`` and ``pickletools.py`` (opcode semantics).
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import clear_frames

from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsafeError
from core.pickle.inert import NO_STATE, PLAIN, Inert, is_flat
from core.pickle.machine import Hook, Limits, Machine
from core.pickle.names import classify, globals_of, judge
from core.pickle.reduce import Name
from core.pickle.uses import Use

__all__ = [
    "DEFAULT_LIMITS",
    "Limits",
    "ReadPickle",
    "ReadPickles",
    "classify",
    "gc_paused",
    "globals_of",
    "judge",
    "keeping_pickles",
    "load",
    "load_next",
    "note_uses",
    "noting_uses",
]

DEFAULT_LIMITS = Limits()

_noted: ContextVar[set[Use] | None] = ContextVar("uses of names in the pickles that are read", default=None)


@dataclass(frozen=True, slots=True)
class ReadPickle:
    """A pickle that was read to its end.

    Args:
        uses: what it does with names.
        tree: what it holds, as ``load`` returned it.
    """

    uses: frozenset[Use]
    tree: object


class ReadPickles:
    """The pickles that were read of some files, so that what needs them again does not read them again.

    Args:
        files: which ones are kept.
    """

    def __init__(self, files: Container[str]) -> None:
        self._files = files
        self._read: dict[str, list[ReadPickle]] = {}
        self._failed: set[str] = set()
        self._has_others = False

    def add(self, file: str, pickle: ReadPickle | None) -> None:
        """Keep a pickle of a file, or None for one that could not be read."""
        if pickle is None:
            self._failed.add(file)
        elif file not in self._files:
            self._has_others = True
        else:
            self._read.setdefault(file, []).append(pickle)

    def are_all_of(self, files: Container[str]) -> bool:
        """Return whether every pickle that was read is one of these files, and was read without an error."""
        is_complete = bool(self._read) and not self._failed and not self._has_others
        return is_complete and all(file in files for file in self._read)

    def of(self, file: str) -> tuple[ReadPickle, ...]:
        """Return the pickles of a file; () if it was not read, or not without an error."""
        return () if file in self._failed else tuple(self._read.get(file, ()))


_kept: ContextVar[ReadPickles | None] = ContextVar("pickles that are kept", default=None)


def load(
    data: bytes | memoryview,
    *,
    label: str,
    persistent_load: Callable[[object], object] | None = None,
    hooks: Mapping[Name, Hook] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> object:
    """The inert tree of a pickle that is all of ``data``.

    Args:
        data: the pickle.
        label: name of the file, for errors.
        persistent_load: makes the value of a persistent id; without it the tree holds ``Persistent``.
        hooks: our functions that make the value of a REDUCE, NEWOBJ, INST or OBJ of a global, from its arguments. An
            object that has a method ``build`` receives the state of a BUILD by it. What a hook returns as
            ``NotImplemented`` becomes an ``Inert`` after all.
        limits: what the pickle may ask for.

    Raises:
        CorruptError: not a well-formed pickle (TruncatedError: it ends too early).
        UnsafeError: it asks for more than the limits, or for something that is never done.
    """
    value, stop = load_next(data, 0, label=label, persistent_load=persistent_load, hooks=hooks, limits=limits)
    if stop != len(data):
        raise CorruptError(f"{len(data) - stop} bytes follow the end of the pickle", file=label, span=(stop, len(data)))
    return value


def load_next(
    data: bytes | memoryview,
    start: int,
    *,
    label: str,
    persistent_load: Callable[[object], object] | None = None,
    hooks: Mapping[Name, Hook] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[object, int]:
    """The inert tree of the pickle that begins at byte ``start``, and the byte after its end.

    For streams of several pickles. Arguments and errors are those of ``load``.
    """
    machine = Machine(persistent_load, hooks or {}, limits)
    value: object = None
    is_read = False
    try:
        with gc_paused():
            value, stop = machine.run(data if type(data) is bytes else bytes(data), start)
            if limits.max_depth is not None and machine.n_objects > limits.max_depth:
                _check_depth(value, limits.max_depth)
        is_read = True
        return value, stop
    except CheckpointingException as err:
        value = None
        clear_frames(err.__traceback__)  # an error that is kept must not keep millions of objects
        if err.file is None:
            err.file = label
        raise
    except (MemoryError, RecursionError) as err:
        raise UnsafeError("the pickle asks for too much memory or depth", file=label) from err
    except (IndexError, struct.error) as err:
        if machine.at >= len(data):
            raise TruncatedError("the pickle ends too early", file=label, span=(start, len(data))) from err
        raise _malformed(label, machine.at, err) from err
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, LookupError) as err:
        raise _malformed(label, machine.at, err) from err
    finally:
        uses = machine.uses
        note_uses(uses)
        kept = _kept.get()
        if kept is not None:
            kept.add(label, ReadPickle(frozenset(uses), value) if is_read else None)


@contextmanager
def noting_uses(*, passes_on: bool = True) -> Iterator[set[Use]]:
    """Collect what the pickles that this thread reads in the block do with names, also with those they drop again.

    A tree does not tell them all: a call whose result is popped from the stack, or handed to something that does not
    keep it, would run in another reader all the same.

    Args:
        passes_on: to the block around this one; if not, the pickles are not kept either.
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
    kept = ReadPickles(files)
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def note_uses(uses: Iterable[Use]) -> None:
    """Add to what ``noting_uses`` collects."""
    noted = _noted.get()
    if noted is not None:
        noted.update(uses)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switches the cyclic garbage collector off; it costs most of the time while millions of objects are made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _malformed(label: str, at: int, err: Exception) -> CorruptError:
    reason = f"{type(err).__name__}: {str(err)[:200]}"
    return CorruptError(f"malformed pickle at byte {at}: {reason}", file=label)


def _check_depth(value: object, max_depth: int) -> None:
    """Raises UnsafeError if a depth-first walk that visits nothing twice goes deeper than ``max_depth``."""
    seen: set[int] = set()
    path: list[Iterator[object]] = [iter((value,))]
    while path:
        for node in path[-1]:
            kind = type(node)
            if kind in PLAIN or id(node) in seen:
                continue
            children: Iterator[object]
            if kind is dict:
                keys: Iterable[object] = () if is_flat(node) else node  # type: ignore[arg-type, assignment]
                children = iter([*keys, *node.values()])  # type: ignore[attr-defined]
            elif kind is list or kind is tuple or kind is set or kind is frozenset:
                children = iter(() if is_flat(node) else node)  # type: ignore[call-overload, arg-type]
            elif kind is Inert:
                children = iter(_parts(node))  # type: ignore[arg-type]
            else:
                continue
            seen.add(id(node))
            path.append(children)
            if len(path) > max_depth:
                raise UnsafeError(f"the pickle nests more than {max_depth} levels deep")
            break
        else:
            path.pop()


def _parts(node: Inert) -> list[object]:
    parts: list[object] = [node.fn, node.args, *node.items]
    if node.kwargs:
        parts.append(node.kwargs)
    if node.state is not NO_STATE:
        parts.append(node.state)
    for entry in node.entries:
        parts += entry
    return parts
