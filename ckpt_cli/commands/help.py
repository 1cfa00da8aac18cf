"""``ckpt help``: the pages of docs/ that an installed copy has, shown and searched in the terminal.

A checkout has them in docs/; the wheel has a copy in this package (``force-include`` of
pyproject.toml). On a terminal they are drawn; in a pipe they are the Markdown itself.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Block, Cell, Facts, draw_text
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError, did_you_mean
from core.verbs.explain.messages import read_messages
from core.verbs.explain.search import (
    PageMatch,
    PageSection,
    plain_text,
    rank_sections,
    split_sections,
)

if TYPE_CHECKING:
    from ckpt_cli.screen.help_page import Section

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_TASKS = "tasks"
"""The folder of pages that answer a question each; the list of topics has them by title."""
_WEIGHTS = {_TASKS: 1.3, "reference": 0.8, "checks": 0.5}
"""Folder, or page → how much more it answers questions than others; codes have ``ckpt explain``."""
_FOLDERS = (_TASKS, "howto", "guide", "reference")
_WIDEST = 100
"""Columns of a page in a wide terminal."""
_MOST_ANSWERS = 5
"""Maximum number of sections that are shown for a question."""
_PASSAGE_COLUMNS = 360
"""Maximum number of characters of a passage that are shown."""


def find_pages() -> Mapping[str, Path]:
    """Return the pages by name: ``tasks/merge-lora``, ``howto/deepspeed``, ``troubleshooting``."""
    installed_dir = _PACKAGE_DIR / "docs"
    docs_dir = installed_dir if installed_dir.is_dir() else _PACKAGE_DIR.parent / "docs"
    paths = [path for folder in _FOLDERS for path in sorted((docs_dir / folder).glob("*.md"))]
    paths += docs_dir.glob("troubleshooting.md")
    return {path.relative_to(docs_dir).with_suffix("").as_posix(): path for path in paths}


def show_topic(topic: str) -> int:
    """Show the page of a topic, or a section of it, or where the pages answer a question; return 0.

    Args:
        topic: the name of a page, with its folder or without; ``PAGE#SECTION``, as in a link; or
            words.

    Raises:
        UsageError: there is no such page, and none that has the words.
    """
    name, _, anchor = topic.partition("#")
    path = _name_pages().get("-".join(name.lower().split()))
    if path is None:
        blocks = list(answer_blocks(topic))
        if not blocks:
            hint = did_you_mean(topic, _name_pages()) or "list commands and topics: ckpt help"
            raise UsageError(f"no such command or topic: {topic}", hint=hint)
        print_page(draw_text(screen_of(sys.stdout), blocks), pager_of(sys.stdout))
        return 0
    text = _read_page(path)
    if anchor:
        text = _cut_section(name, text, anchor)
    screen = screen_of(sys.stdout)
    lines = (
        _drawn_lines(text, has_color=screen.has_color) if sys.stdout.isatty() else text.splitlines()
    )
    print_page(lines, pager_of(sys.stdout))
    return 0


def answer_blocks(question: str) -> Iterator[Block]:
    """Yield the sections of pages that share most words with a question; nothing if none does.

    Each has its page, its heading, the passage, and the command that shows all of it.
    """
    for number, match in enumerate(find_answers(question)[:_MOST_ANSWERS]):
        section = match.section
        yield from [""] if number else []
        heading = "" if section.heading == section.title else f": {section.heading}"
        yield Cell(plain_text(f"{section.title}{heading}"), ("bold",))
        yield Facts(
            [("", shorten(match.passage, _PASSAGE_COLUMNS, placeholder=" …"))] * bool(match.passage)
            + [("", Cell(_name_command(section), ("cyan",)))],
            indent=0,
        )


def find_answers(question: str) -> list[PageMatch]:
    """Return the sections of all pages that share most words with a question, the best first."""
    sections: list[PageSection] = []
    for path in find_pages().values():
        weight = _WEIGHTS.get(path.stem, _WEIGHTS.get(path.parent.name, 1.0))
        sections += split_sections(path.stem, _read_page(path), weight=weight)
    return rank_sections(sections, question)


def _name_command(section: PageSection) -> str:
    """Return the command that shows a section."""
    if section.page == "troubleshooting":
        # The page is made of messages, which have their own command.
        for message in read_messages().values():
            if message.title == plain_text(section.heading):
                return f"ckpt explain {message.name}"
    is_whole = section.heading == section.title
    return f"ckpt help {section.page}{'' if is_whole else f'#{section.anchor}'}"


def _cut_section(page: str, text: str, anchor: str) -> str:
    """Return a section of a page with those below it.

    Raises:
        UsageError: the page has no such section.
    """
    sections = split_sections(page, text)
    anchors = [section.anchor for section in sections]
    if anchor not in anchors:
        hint = did_you_mean(anchor, anchors) or f"show the complete page: ckpt help {page}"
        raise UsageError(f"the page {page} has no section {anchor}", hint=hint)
    first, *others = sections[anchors.index(anchor) :]
    below = takewhile(lambda section: section.level > first.level, others)
    parts = (f"{'#' * part.level} {part.heading}\n{part.text}" for part in (first, *below))
    return "\n".join(parts).rstrip()


def _name_pages() -> Mapping[str, Path]:
    """Return the pages by name, with the folder and without."""
    pages = find_pages()
    return {name.rpartition("/")[2]: path for name, path in pages.items()} | dict(pages)


def _read_page(path: Path) -> str:
    """Return the Markdown of a page without its comments."""
    return re.sub(r"<!--.*?-->\n*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def topic_sections() -> Iterator[Section]:
    """Yield the topics of ``ckpt help``: the tasks by title, the other pages by name."""
    from ckpt_cli.screen.help_page import Section

    pages = find_pages()
    tasks = {name: path for name, path in pages.items() if name.startswith(f"{_TASKS}/")}
    rows = [(name.rpartition("/")[2], _read_title(path)) for name, path in tasks.items()]
    yield Section("Topics (ckpt help TOPIC)", rows)
    others = [name for name in pages if name not in tasks]
    yield Section("Pages (ckpt help PAGE)", [("", ", ".join(others))])


def _read_title(path: Path) -> str:
    """Return the title of a page."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()


def _drawn_lines(text: str, *, has_color: bool) -> list[str]:
    """Return a page as lines for a terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    width = min(shutil.get_terminal_size().columns, _WIDEST)
    console = Console(width=width, force_terminal=True, no_color=not has_color)
    with console.capture() as capture:
        console.print(Markdown(text, hyperlinks=False))
    return capture.get().splitlines()
