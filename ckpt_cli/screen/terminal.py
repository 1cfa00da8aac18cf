"""The capabilities of a terminal (width, colours, glyphs), and text made safe for it.

Names and messages come from untrusted files. ``escaped`` is applied to each of them before it is
printed, so that no file can move the cursor, change colours or reverse the direction of text.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from core.values import dataclass

_SGR = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
"""Style → parameter of the escape sequence SGR."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The capabilities of an output stream.

    Args:
        width: columns of the terminal; None for files and pipes, where nothing is shortened.
        has_color: escape sequences for colours are wanted.
        has_unicode: the encoding contains more than ASCII characters, and the terminal can show
            them.
    """

    width: int | None = None
    has_color: bool = False
    has_unicode: bool = True

    def styled(self, text: str, *styles: str) -> str:
        """Return the text in the given styles, or unchanged if colours are not wanted."""
        if not self.has_color or not styles or not text:
            return text
        return f"\x1b[{';'.join(_SGR[style] for style in styles)}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """Return the text, with ckpt's own glyphs replaced by ASCII if the encoding lacks them."""
        return text if self.has_unicode else text.translate(_ASCII)


_ASCII = {
    ord(glyph): ascii
    for glyph, ascii in {
        "·": "|", "×": "x", "…": "...", "–": "-", "→": "->", "←": "<-", "✓": "+", "✗": "-",
        "├": "|", "└": "`", "─": "-", "│": "|", "━": "=", "■": "#", "±": "+-", "▼": "v",
        "▏": "-", "▎": "-", "▍": "-", "▌": "#", "▋": "#", "▊": "#", "▉": "#", "█": "#",
        "▁": ".", "▂": ":", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
    }.items()
}  # fmt: skip


def screen_of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
    """Return the capabilities of ``stream``.

    Args:
        stream: stdout or stderr.
        environ: ``NO_COLOR`` and ``TERM=dumb`` switch colours off, ``FORCE_COLOR`` switches them
            on, and ``COLUMNS`` sets the width. ``TERM=dumb`` also means ASCII.
    """
    # NO_COLOR wins over FORCE_COLOR.
    is_terminal = stream.isatty()
    wants_color = is_terminal and environ.get("TERM") != "dumb"
    if environ.get("FORCE_COLOR"):
        wants_color = True
    if environ.get("NO_COLOR"):
        wants_color = False
    encoding = (stream.encoding or "ascii").lower().replace("-", "").replace("_", "")
    width = max(shutil.get_terminal_size().columns, 40) if is_terminal else None
    has_unicode = encoding.startswith("utf") and environ.get("TERM") != "dumb"
    return Screen(width, wants_color, has_unicode)


def escaped(text: str) -> str:
    """Return the text with unprintable characters spelled as ``\\x1b``, ``\\n``, ``\\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def columns_of(text: str) -> int:
    """Return the columns that the text (without escape sequences) takes in a terminal."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    # Combining marks take no column; wide (W) and full-width (F) characters take two.
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return the text filled with spaces to ``width`` columns, on its left if ``right``."""
    room = " " * max(width - columns_of(text), 0)
    return room + text if right else text + room


def shortened(text: str, width: int, *, lead: int = 0, ellipsis: str = "…") -> str:
    """Return the text, with its middle replaced by ``…`` if it takes more than ``width`` columns.

    Args:
        lead: characters at the start that stay.
    """
    if columns_of(text) <= width:
        return text
    # The end of a name tells more than its start: it gets the odd column.
    start, rest = text[:lead], text[lead:]
    room = max(width - columns_of(start) - len(ellipsis), 2)
    head, tail = room // 2, room - room // 2
    while columns_of(rest[:head]) > room // 2:
        head -= 1
    while columns_of(rest[len(rest) - tail :]) > room - room // 2:
        tail -= 1
    return f"{start}{rest[:head]}{ellipsis}{rest[len(rest) - tail :]}"


def print_note(note: str) -> None:
    """Print a one-line note to stderr; ignore the error if the terminal is gone.

    Its label is ``note``, or the first word of a note that begins with ``WARNING:``.
    """
    label, text = (
        ("WARNING:", note[8:].lstrip()) if note.startswith("WARNING:") else ("note:", note)
    )
    with suppress(OSError):
        print(
            f"{screen_of(sys.stderr).styled(label, 'yellow')} {escaped(text)}",
            file=sys.stderr,
            flush=True,
        )
