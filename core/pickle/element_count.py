"""Count what a pickle puts into containers without creating any of it.

One pass over the opcodes follows the depth of the stack alone, in a fifth of the machine's time,
and stores nothing. A pickle that cannot be followed to its end is counted up to there: the
machine (``core.pickle.machine``) says what is wrong with it.

Source: CPython 3.11 ``pickletools.py``, whose table gives operands and effects on the stack.
"""

from __future__ import annotations

import pickletools
from functools import cache

_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "LIST", "DICT", "FROZENSET"}
_TWO_LINES = {"GLOBAL", "INST"}


def count_elements(data: bytes, start: int = 0) -> int:
    """Return how many elements a pickle puts into lists, dicts and sets, keys included.

    Elements of tuples, which most arguments of calls are, do not count.

    Args:
        start: position of the pickle's first byte.
    """
    steps, changes, lengths, lines, to_mark, filling = _tables()
    n_elements, depth, i = 0, 0, start
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
                size = lengths[op]
                i += size + int.from_bytes(data[i : i + size], "little")
            for _ in range(lines.get(op, 0)):
                i = data.index(b"\n", i) + 1
            # Follow the stack.
            if op == 0x28:  # MARK
                marks.append(depth)
            elif op == 0x2E:  # STOP
                return n_elements
            elif op in to_mark:
                base = marks.pop()
                if op in filling:
                    n_elements += depth - base
                depth = base + changes[op]
            else:
                depth += changes[op]
                if op in filling:
                    n_elements -= changes[op]
    except (LookupError, ValueError):
        return n_elements


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
        if n in _LENGTHS:
            lengths[op] = _LENGTHS[n]
        elif n < 0:
            lines[op] = 2 if name in _TWO_LINES else 1
        elif not (has_mark or name in _FILLING or name in ("MARK", "STOP")):
            steps[op] = 1 + n
    return steps, changes, lengths, lines, to_mark, filling
