"""``ckpt help``: the pages and examples of docs/, shown and searched in the terminal.

A checkout has them in docs/; the wheel has a copy in this package (``force-include`` of
pyproject.toml). On a terminal pages are drawn; in a pipe they are the Markdown itself.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from ckpt_cli.options.short_help import SHORT_HELP
from ckpt_cli.screen.blocks import Block, Cell, Facts, draw_text
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError, did_you_mean
from core.verbs.checks.finding import codes
from core.verbs.explain.messages import read_messages
from core.verbs.explain.search import (
    CODE_SPAN,
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
_WEIGHTS = {
    _TASKS: 1.3,
    "reference": 0.8,
    "checks": 0.5,
    "explanation": 0.6,
    "facts": 0.5,
    "adding": 0.4,
}
"""Folder, or page → how much more it answers questions than others; codes have ``ckpt explain``."""
_FOLDERS = (_TASKS, "howto", "guide", "reference", "explanation", "facts", "adding")
"""The folders of pages that are listed and searched; of pages of one name, the first is meant."""
_EXAMPLES = "examples"
_FENCE = r"^```.*?^```"
_CODE_OR_LINK = re.compile(
    rf"{_FENCE}|(?<![`!])\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)|{CODE_SPAN.pattern}",
    re.DOTALL | re.MULTILINE,
)
"""A block or span of code, or a link with its text, which may contain code."""
_WIDEST = 100
"""Columns of a page in a wide terminal."""
_MOST_ANSWERS = 5
"""Maximum number of sections that are shown for a question."""
_PASSAGE_COLUMNS = 360
"""Maximum number of characters of a passage that are shown."""


@cache
def find_files() -> Mapping[str, Path]:
    """Return all pages and examples by their path in docs/, such as ``guide/prune.md``."""
    installed_dir = _PACKAGE_DIR / "docs"
    docs_dir = installed_dir if installed_dir.is_dir() else _PACKAGE_DIR.parent / "docs"
    paths = [path for path in sorted(docs_dir.rglob("*")) if path.is_file()]
    names = {path.relative_to(docs_dir).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in names.items()
        if path.suffix == ".md"
        or (name.startswith(f"{_EXAMPLES}/") and path.parent.name != "__pycache__")
    }


def find_pages() -> Mapping[str, Path]:
    """Return the listed pages by name: ``tasks/merge-lora``, ``guide/prune``, ``troubleshooting``.

    Decisions are not among them: ``decisions/README`` lists those, and ``ckpt help`` shows them.
    """
    names = {name: path for name, path in find_files().items() if path.suffix == ".md"}
    pages = {
        name.removesuffix(".md"): path
        for folder in _FOLDERS
        for name, path in names.items()
        if name.startswith(f"{folder}/")
    }
    return pages | {"troubleshooting": names["troubleshooting.md"]}


def show_topic(topic: str) -> int:
    """Show the page of a topic, or a section of it, or where the pages answer a question; return 0.

    Args:
        topic: the name of a page or an example, with its folder or without; ``PAGE#SECTION``, as
            in a link; or words.

    Raises:
        UsageError: there is no such page, and none that has the words.
    """
    name, _, anchor = topic.partition("#")
    names = _name_files()
    path = names.get("-".join(name.lower().split()).removeprefix("docs/").removesuffix(".md"))
    if path is None:
        blocks = list(answer_blocks(topic, is_nearest_enough=True))
        if not blocks:
            hint = did_you_mean(topic, names) or "list commands and topics: ckpt help"
            raise UsageError(f"no such command or topic: {topic}", hint=hint)
        print_page(draw_text(screen_of(sys.stdout), blocks), pager_of(sys.stdout))
        return 0
    is_page = path.suffix == ".md"
    text = _read_page(path) if is_page else path.read_text(encoding="utf-8")
    if anchor:
        text = _cut_section(name, text, anchor)
    lines = text.splitlines()
    if is_page and sys.stdout.isatty():
        (docs_name,) = (name for name, page in find_files().items() if page == path)
        has_color = screen_of(sys.stdout).has_color
        lines = _drawn_lines(link_commands(text, docs_name), has_color=has_color)
    print_page(lines, pager_of(sys.stdout))
    return 0


def answer_blocks(question: str, *, is_nearest_enough: bool = False) -> Iterator[Block]:
    """Yield the sections of pages that share most words with a question; nothing if none does.

    Each has its page, its heading, the passage, and the command that shows all of it.

    Args:
        is_nearest_enough: a few shared words are enough if no section has most of them.
    """
    matches = find_answers(question, is_nearest_enough=is_nearest_enough)
    for number, match in enumerate(matches[:_MOST_ANSWERS]):
        section = match.section
        yield from [""] if number else []
        heading = "" if section.heading == section.title else f": {section.heading}"
        yield Cell(plain_text(f"{section.title}{heading}"), ("bold",))
        yield Facts(
            [("", shorten(match.passage, _PASSAGE_COLUMNS, placeholder=" …"))] * bool(match.passage)
            + [("", Cell(_name_command(section), ("cyan",)))],
            indent=0,
        )


def find_answers(question: str, *, is_nearest_enough: bool = False) -> list[PageMatch]:
    """Return the sections of all pages that share most words with a question, the best first."""
    sections: list[PageSection] = []
    for name, path in find_pages().items():
        weight = _WEIGHTS.get(path.stem, _WEIGHTS.get(path.parent.name, 1.0))
        sections += split_sections(_shorten_name(name), _read_page(path), weight=weight)
    return rank_sections(sections, question, is_nearest_enough=is_nearest_enough)


def _name_command(section: PageSection) -> str:
    """Return the command that shows a section."""
    if section.page == "troubleshooting":
        # The page is made of messages, which have their own command.
        for message in read_messages().values():
            if message.title == plain_text(section.heading):
                return f"ckpt explain {message.name}"
    is_whole = section.heading == section.title
    return name_command(section.page, "" if is_whole else section.anchor)


def name_command(name: str, anchor: str = "") -> str:
    """Return the command that shows a page, or a section of it.

    Args:
        name: the name of the page or example, with its folder or without.
        anchor: the anchor of the section.
    """
    short = _shorten_name(name)
    if anchor.upper() in codes():
        return f"ckpt explain {anchor.upper()}"
    if anchor:
        return f"ckpt help {short}#{anchor}"
    # Of a name that is also a command's, ckpt help shows the options.
    (full,) = (key for key, path in find_files().items() if path == _name_files()[short.lower()])
    return f"ckpt help {full.removesuffix('.md') if short in SHORT_HELP else short}"


def link_commands(text: str, page: str) -> str:
    """Return a page with the commands that show the linked pages in place of their addresses.

    Args:
        page: its path in docs/.
    """

    def name_target(match: re.Match[str]) -> str:
        if match["target"] is None or "://" in match["target"]:
            return match[0]
        name, _, anchor = match["target"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
        return f"{match['text']} (`{name_command(path.removesuffix('.md'), anchor)}`)"

    return _CODE_OR_LINK.sub(name_target, text)


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


@cache
def _name_files() -> Mapping[str, Path]:
    """Return pages and examples by name in lower case, with the folder and without."""
    files = {name.removesuffix(".md").lower(): path for name, path in find_files().items()}
    listed = [*find_pages(), *_list_examples()]
    short = {name.rpartition("/")[2].lower(): files[name.lower()] for name in reversed(listed)}
    return short | files


def _list_examples() -> list[str]:
    """Return the names of the examples, with their folder."""
    return [name for name, path in find_files().items() if path.suffix != ".md"]


def _shorten_name(name: str) -> str:
    """Return the name of a page or an example without its folder, unless another page has it."""
    short = name.rpartition("/")[2]
    names = _name_files()
    return short if names.get(short.lower()) == names[name.lower()] else name


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
    examples = [_shorten_name(name) for name in _list_examples()]
    yield Section("Examples (ckpt help NAME > NAME)", [("", ", ".join(examples))])


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
