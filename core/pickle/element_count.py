"""Count what a pickle puts into containers, and its long strings, without creating any of it.

One pass over the opcodes follows the depth of the stack alone, in a fifth of the machine's time,
and stores nothing. A pickle that cannot be followed to its end is counted up to there: the
machine (``core.pickle.machine``) says what is wrong with it.

Source: CPython 3.11 ``pickletools.py``, whose table gives operands and effects on the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from core.errors import CapacityError
from core.pickle.inert import LONG_BYTES
from core.values import dataclass

_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "LIST", "DICT", "FROZENSET"}
_NEW = frozenset(b"]}\x8fld\x91")
"""EMPTY_LIST, EMPTY_DICT, EMPTY_SET, LIST, DICT, FROZENSET."""
_TWO_LINES = {"GLOBAL", "INST"}


@dataclass(frozen=True, slots=True)
class Elements:
    """The numbers of elements and containers in a pickle, and the length of its long strings.

    Args:
        n: number of elements in lists, dicts and sets, keys included. Those of tuples, which most
            arguments of calls are, do not count.
        n_containers: number of lists, dicts and sets.
        long_bytes: length of all long strings, in bytes.
    """

    n: int
    n_containers: int
    long_bytes: int


def count_elements(data: bytes, start: int = 0) -> Elements:
    """Count the elements, containers and long strings of a pickle.

    Args:
        start: position of the pickle's first byte.
    """
    steps, changes, lengths, lines, to_mark, filling = _tables()
    n_elements = n_containers = long_bytes = depth = 0
    i = start
    marks: list[int] = []
    try:
        while True:
            # Most opcodes have an operand of fixed size, and push or pop a fixed number of values.
            op = data[i]
            step = steps[op]
            if step:
                i += step
                depth += changes[op]
                continue
            # Skip the operand.
            i += 1
            if op in lengths:
                width = lengths[op]
                size = int.from_bytes(data[i : i + width], "little")
                i += width + size
                if LONG_BYTES <= size <= len(data):
                    long_bytes += size
            for _ in range(lines.get(op, 0)):
                i = data.index(b"\n", i) + 1
            # Follow the stack.
            if op == 0x28:  # MARK
                marks.append(depth)
            elif op == 0x2E:  # STOP
                return Elements(n_elements, n_containers, long_bytes)
            elif op in to_mark:
                base = marks.pop()
                if op in filling:
                    n_elements += depth - base
                    n_containers += op in _NEW
                depth = base + changes[op]
            else:
                depth += changes[op]
                if op in filling:
                    n_elements -= changes[op]
                n_containers += op in _NEW
    except (LookupError, ValueError):
        return Elements(n_elements, n_containers, long_bytes)


CheckValues = Callable[[Elements], CapacityError | None]
"""Returns the error for a pickle that contains so much; None if it may be read."""
_value_limit: ContextVar[tuple[int, CheckValues] | None] = ContextVar(
    "limit on values", default=None
)


@contextmanager
def limiting_values(n_free: int, check: CheckValues) -> Iterator[None]:
    """Refuse each pickle that this thread reads in the block and that has too many values.

    Args:
        n_free: bytes of a pickle that is read in any case.
        check: judges a longer one, whose values are counted before any is created.
    """
    token = _value_limit.set((n_free, check))
    try:
        yield
    finally:
        _value_limit.reset(token)


def check_element_count(data: bytes | memoryview, start: int, *, label: str) -> None:
    """Raise CapacityError unless ``limiting_values`` allows a pickle."""
    limit = _value_limit.get()
    if limit is None or len(data) - start <= limit[0]:
        return
    err = limit[1](count_elements(bytes(data), start))
    if err is not None:
        err.file = label
        raise err


@cache
def _tables() -> tuple[list[int], list[int], dict[int, int], dict[int, int], set[int], set[int]]:
    """Return what each opcode does, by its byte.

    Returns:
        steps: bytes of opcode and operand; 0 if ``changes`` does not tell all that it does.
        changes: by how much it changes the stack's depth; with a mark, from the mark on.
        lengths: bytes of the length in front of its operand.
        lines: number of operands that are lines of text.
        to_mark: the opcodes that take everything down to a mark.
        filling: the opcodes that fill a container.
    """
    import pickletools

    length_bytes = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    steps, changes = [0] * 256, [0] * 256
    lengths: dict[int, int] = {}
    lines: dict[int, int] = {}
    to_mark: set[int] = set()
    filling: set[int] = set()
    for opcode in pickletools.opcodes:
        op, name, before = ord(opcode.code), opcode.name, opcode.stack_before
        if name in _FILLING:
            filling.add(op)
        # What is below the mark is a container that stays.
        has_mark = pickletools.markobject in before
        n_before = before.index(pickletools.markobject) if has_mark else len(before)
        changes[op] = len(opcode.stack_after) - n_before
        if has_mark:
            to_mark.add(op)
        n = 0 if opcode.arg is None else opcode.arg.n
        if n in length_bytes:
            lengths[op] = length_bytes[n]
        elif n < 0:
            lines[op] = 2 if name in _TWO_LINES else 1
        elif not (has_mark or name in _FILLING or op in _NEW or name in ("MARK", "STOP")):
            steps[op] = 1 + n
    return steps, changes, lengths, lines, to_mark, filling
