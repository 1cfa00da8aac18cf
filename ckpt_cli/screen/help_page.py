"""Writes a help page for a screen: usage, description, examples, sections of options.

typer writes pages in colour with rich, whose import takes longer than all of ``ckpt --help``.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ckpt_cli.screen.terminal import Screen, columns_of, padded
from core.values import dataclass

_LABEL_COLUMNS = 24
"""Widest label with its text on the same line; below a wider one, the text starts a line."""
_NARROWEST, _WIDEST = 50, 100
"""Columns of a page in very narrow and in wide terminals."""
_OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a help page with a heading.

    Args:
        heading: its title.
        rows: (name and metavar of an option, its text) pairs, or those of arguments and commands.
    """

    heading: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HelpPage:
    """The parts of a help page, from top to bottom.

    Args:
        program: the command, such as ``ckpt convert``.
        usage: the words after it in the usage line.
        paragraphs: the description of the command.
        examples: (what it does, command line) pairs.
        sections: arguments, commands and options.
        notes: paragraphs below the options.
        pointers: (label, text) pairs of the last lines, such as where the documentation is.
    """

    program: str
    usage: Sequence[str]
    paragraphs: Sequence[str]
    examples: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    notes: Sequence[str]
    pointers: Sequence[tuple[str, str]]

    def text(self, screen: Screen) -> str:
        """Return the page as one text, as wide as the terminal and at most 100 columns."""
        width = _page_width()
        blocks = [
            self._usage_lines(screen, width),
            *([*_wrapped(text, width, indent=2)] for text in self.paragraphs),
            [*self._example_lines(screen, width)],
            *([*_section_lines(section, screen, width)] for section in self.sections),
            *([*_wrapped(text, width, indent=2)] for text in self.notes),
            [f"{screen.styled(f'{label}:', 'bold')} {text}" for label, text in self.pointers],
        ]
        return screen.plain("\n\n".join("\n".join(lines) for lines in blocks if lines))

    def _usage_lines(self, screen: Screen, width: int) -> list[str]:
        """Return the usage line, wrapped below its arguments."""
        start = f"Usage: {self.program} "
        lines = textwrap.wrap(
            " ".join(self.usage),
            width - len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines[0] = f"{screen.styled('Usage:', 'bold')} {self.program} {lines[0]}"
        return [lines[0], *(" " * len(start) + line for line in lines[1:])]

    def _example_lines(self, screen: Screen, width: int) -> Iterator[str]:
        """Yield each example: a comment of the shell, and the command to paste."""
        if self.examples:
            yield screen.styled("Examples:", "bold")
        for purpose, command in self.examples:
            yield f"  {screen.styled(f'# {purpose}', 'dim')}"
            yield f"  {command}"


def sections_text(sections: Iterable[Section], screen: Screen) -> str:
    """Return sections as one text, as wide as a page."""
    blocks = (_section_lines(section, screen, _page_width()) for section in sections)
    return screen.plain("\n\n".join("\n".join(lines) for lines in blocks))


def _page_width() -> int:
    """Return the columns of a page on this terminal."""
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def _section_lines(section: Section, screen: Screen, width: int) -> Iterator[str]:
    """Yield a heading and the rows below it, in two columns."""
    yield screen.styled(f"{section.heading}:", "bold")
    label_columns = max(
        (size for label, _ in section.rows if (size := columns_of(label)) <= _LABEL_COLUMNS),
        default=_LABEL_COLUMNS,
    )
    indent = 2 + label_columns + 2
    for label, text in section.rows:
        lines = [*_wrapped(text, width, indent=indent)]
        styled = _styled_label(label, screen)
        if columns_of(label) > label_columns or not lines:
            # A switch with two long names, "--x / --no-x", may need a line for each.
            is_too_wide = columns_of(label) > width - 2
            yield from f"  {styled}".replace(" / ", " /\n  " if is_too_wide else " / ").split("\n")
        else:
            room = padded(label, label_columns + 2)[len(label) :]
            yield f"  {styled}{room}{lines.pop(0).lstrip()}"
        yield from lines


def _styled_label(label: str, screen: Screen) -> str:
    """Return a label with the names of options in colour; all of it, if it names none."""
    if not _OPTION.search(label):
        return screen.styled(label, "cyan")
    return _OPTION.sub(lambda name: screen.styled(name[0], "cyan"), label)


def _wrapped(text: str, width: int, *, indent: int) -> Iterator[str]:
    """Yield the lines of a text; names of options are not broken at their hyphens."""
    yield from textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
