"""Read a pickle without running anything: a machine for protocols 0 to 5 that builds inert trees.

No name in a pickle is imported, looked up or called, and ``pickle.Unpickler`` is not used: it
allocates as much memory as a memo index or a length demands, and nested tuple keys overflow its
stack (docs/facts/safety.md 2.3). A name becomes a ``Global``; REDUCE, NEWOBJ, INST and OBJ create
an ``Inert`` with its arguments; BUILD sets its ``state``; SETITEMS and APPENDS fill its ``entries``
and ``items``. Refused by name: the copyreg extension registry (EXT1/2/4), out-of-band buffers, text
persistent ids.

Bounds: the number of objects is limited in proportion to the length of the pickle
(``PickleLimits``), so that memory stays below 100 MB plus 40 times that length; time is linear;
nothing recurses. Lengths are compared with the data before memory is allocated for them.

Some callables that only create plain values are normalised (``core.pickle.reduce``): ``torch.Size``
to a tuple (the hooks of torch's files keep the class), sets, bytes of protocol 2,
``getattr(Class, "name")`` to a longer name, module names of Python 2.

Source: CPython 3.11 ``pickle.py`` and ``pickletools.py`` (opcode semantics).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from traceback import clear_frames

from core.errors import (
    UNLIKE_ANY_WRITER,
    CheckpointingException,
    CorruptError,
    TruncatedError,
    UnsafeError,
)
from core.pickle.element_count import check_element_count
from core.pickle.inert import PLAIN, Inert, parts_to_visit
from core.pickle.machine import Hook, Machine, PickleLimits, depth_error
from core.pickle.noted import gc_paused, note_read
from core.pickle.reduce import Name

__all__ = ["DEFAULT_LIMITS", "PickleLimits", "load", "load_next"]

DEFAULT_LIMITS = PickleLimits()

_LIMITS_HINT = (
    "no training framework writes such a pickle, so do not load it with any other program, and ask "
    "whoever wrote it for the weights as safetensors"
)
"""Hint for what would take another reader's time or memory."""


def load(
    data: bytes | memoryview,
    *,
    label: str,
    persistent_load: Callable[[object], object] | None = None,
    hooks: Mapping[Name, Hook] | None = None,
    limits: PickleLimits = DEFAULT_LIMITS,
) -> object:
    """Read a pickle that takes up all of ``data``, and return its inert tree.

    Args:
        data: the pickle.
        label: name of the file, for errors.
        persistent_load: creates the value of a persistent id; by default the tree holds
            ``Persistent``.
        hooks: module and name → our own function that creates the value of a REDUCE, NEWOBJ, INST
            or OBJ of that global from its arguments, or returns ``NotImplemented`` for an
            ``Inert``. If the value has a method ``build``, that receives the state of a BUILD.
        limits: limits on the objects, names and strings of the pickle.

    Raises:
        CorruptError: not a well-formed pickle, or bytes follow its end.
        TruncatedError: the pickle ends too early.
        UnsafeError: the pickle exceeds the limits, or uses an opcode that is never run.
    """
    value, stop = load_next(
        data, 0, label=label, persistent_load=persistent_load, hooks=hooks, limits=limits
    )
    if stop != len(data):
        raise CorruptError(
            f"{len(data) - stop} bytes follow the end of the pickle",
            file=label,
            span=(stop, len(data)),
        )
    return value


def load_next(
    data: bytes | memoryview,
    start: int,
    *,
    label: str,
    persistent_load: Callable[[object], object] | None = None,
    hooks: Mapping[Name, Hook] | None = None,
    limits: PickleLimits = DEFAULT_LIMITS,
) -> tuple[object, int]:
    """Read the pickle that begins at byte ``start``, for streams of several pickles.

    Arguments and errors are those of ``load``.

    Returns:
        Its inert tree, and the position after its end.

    Raises:
        CapacityError: it has more values than ``limiting_values`` allows.
    """
    check_element_count(data, start, label=label)
    machine = Machine(persistent_load, hooks or {}, limits)
    value: object = None
    is_read = False
    try:
        with gc_paused():
            value, stop = machine.run(bytes(data), start)  # no copy if the data are bytes already
            # A tree of fewer containers than levels cannot be too deep.
            if limits.max_depth is not None and machine.n_objects > limits.max_depth:
                _check_depth(value, limits.max_depth)
        is_read = True
        return value, stop
    except CheckpointingException as err:
        # The traceback refers to the machine's variables: somebody who keeps the error must not
        # keep millions of objects alive.
        value = None
        clear_frames(err.__traceback__)
        if err.file is None:
            err.file = label
        if err.hint is None and isinstance(err, (CorruptError, UnsafeError)):
            err.hint = UNLIKE_ANY_WRITER if isinstance(err, CorruptError) else _LIMITS_HINT
        raise
    except (MemoryError, RecursionError) as err:
        raise UnsafeError(
            "the pickle needs too much memory or is nested too deeply",
            file=label,
            hint=_LIMITS_HINT,
        ) from err
    except (
        struct.error,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        LookupError,
    ) as err:
        # The machine leaves most checks to Python. A read beyond the end of the data is the sign
        # of a truncated pickle, any other error that of a malformed one.
        if isinstance(err, (IndexError, struct.error)) and machine.at >= len(data):
            raise TruncatedError(
                "the pickle ends too early",
                file=label,
                span=(start, len(data)),
                hint="copy the file again; the previous copy may have been interrupted",
            ) from err
        reason = f"{type(err).__name__}: {str(err)[:200]}"
        raise CorruptError(
            f"malformed pickle at byte {machine.at}: {reason}", file=label, hint=UNLIKE_ANY_WRITER
        ) from err
    finally:
        # The uses count even if the pickle is malformed: another reader runs the calls before the
        # malformed byte.
        note_read(label, machine.uses, value, is_read=is_read)


def _check_depth(value: object, max_depth: int) -> None:
    """Raise UnsafeError if a tree is nested deeper than ``max_depth``.

    Depths are those of a depth-first walk that enters no container twice.
    """
    visited: set[int] = set()
    # The parts that are still to be visited, of each container on the way to the current one.
    path: list[Iterator[object]] = [iter((value,))]
    while path:
        for node in path[-1]:
            kind = type(node)
            if kind in PLAIN or kind not in _CONTAINERS or id(node) in visited:
                continue
            # Descend into this container first; its siblings follow when its parts are done.
            visited.add(id(node))
            path.append(iter(parts_to_visit(node)))
            if len(path) > max_depth:
                raise depth_error(max_depth)
            break
        else:
            path.pop()


_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, Inert))
