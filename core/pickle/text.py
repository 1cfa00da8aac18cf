"""Parse the strings and numbers of a pickle: lines of text, and bytes preceded by their length.

Source: CPython 3.11 ``pickle.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from core.errors import CorruptError, UnsafeError

_MAX_DIGITS = 4300
"""Python's own limit for converting text to an integer."""
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {
    b"n": b"\n",
    b"t": b"\t",
    b"r": b"\r",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
    b"\n": b"",
}


def two_lines(data: bytes, i: int) -> tuple[str, str, int]:
    """Read the two lines of text that begin at byte ``i``.

    Returns:
        The two lines, and the position after them.

    Raises:
        ValueError: a line does not end, or is not UTF-8.
    """
    first = data.index(b"\n", i)
    second = data.index(b"\n", first + 1)
    return data[i:first].decode("utf-8"), data[first + 1 : second].decode("utf-8"), second + 1


def _unescape(match: re.Match[bytes]) -> bytes:
    """Return the byte that an escape sequence of a Python 2 string stands for."""
    code = match[1]
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    if code.isdigit():
        return bytes([int(code, 8) & 255])
    # A backslash before any other character stands for itself, as in Python.
    return _ESCAPES.get(code, code if code in (b"\\", b"'", b'"') else match[0])


def _parse_python2_string(raw: bytes) -> str | bytes:
    """Decode a Python 2 string: to text if it is UTF-8, as ``torch.load`` does, else to bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


SIZED: dict[int, tuple[int, Callable[[bytes], object]]] = {
    0x8D: (8, lambda raw: str(raw, "utf-8", "surrogatepass")),  # BINUNICODE8
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x96: (8, bytearray),  # BYTEARRAY8
    0x55: (1, _parse_python2_string),  # SHORT_BINSTRING
    0x54: (4, _parse_python2_string),  # BINSTRING
}
"""Opcode → number of bytes of its length field, and the function that converts its payload."""


def _parse_string(line: bytes) -> object:
    """Parse the repr of a Python 2 string.

    Raises:
        CorruptError: the line is not quoted.
    """
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"\"'":
        raise CorruptError("malformed pickle: a string without quotes")
    return _parse_python2_string(_ESCAPE.sub(_unescape, line[1:-1]))


def _parse_int(line: bytes) -> int:
    """Parse a decimal integer, with the ``L`` of Python 2's long integers or without.

    Raises:
        UnsafeError: the integer has more digits than Python converts.
        ValueError: the line is not an integer.
    """
    if len(line) > _MAX_DIGITS:
        raise UnsafeError(f"an integer has {len(line):,} digits; the limit is {_MAX_DIGITS:,}")
    return int(line[:-1] if line[-1:] == b"L" else line)


LINES: dict[int, Callable[[bytes], object] | None] = {
    0x53: _parse_string,  # STRING
    0x49: lambda line: line == b"01" if line in (b"00", b"01") else _parse_int(line),  # INT or bool
    0x4C: _parse_int,  # LONG
    0x46: float,  # FLOAT
    0x56: lambda line: str(line, "raw-unicode-escape"),  # UNICODE
    0x67: None,  # GET
    0x70: None,  # PUT
}
"""Opcode whose argument is a line of text → the function that parses the line."""
