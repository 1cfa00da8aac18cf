"""``ckpt help``: the pages of docs/ that an installed copy has, shown in the terminal.

A checkout has them in docs/; the wheel has a copy in this package (``force-include`` of
pyproject.toml). On a terminal they are drawn; in a pipe they are the Markdown itself.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from ckpt_cli.screen.help_page import Section

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_TASKS = "tasks"
"""The folder of pages that answer a question each; the list of topics has them by title."""
_FOLDERS = (_TASKS, "howto", "guide")
_WIDEST = 100
"""Columns of a page in a wide terminal."""


def find_pages() -> Mapping[str, Path]:
    """Return the pages by name: ``tasks/merge-lora``, ``howto/deepspeed``, ``troubleshooting``."""
    installed_dir = _PACKAGE_DIR / "docs"
    docs_dir = installed_dir if installed_dir.is_dir() else _PACKAGE_DIR.parent / "docs"
    paths = [path for folder in _FOLDERS for path in sorted((docs_dir / folder).glob("*.md"))]
    paths += docs_dir.glob("troubleshooting.md")
    return {path.relative_to(docs_dir).with_suffix("").as_posix(): path for path in paths}


def show_topic(topic: str) -> int:
    """Show the page of a topic; return 0.

    Args:
        topic: the name of a page, with its folder or without.

    Raises:
        UsageError: there is no such page.
    """
    pages = find_pages()
    by_stem = {name.rpartition("/")[2]: path for name, path in pages.items()}
    path = pages.get(topic) or by_stem.get(topic)
    if path is None:
        hint = did_you_mean(topic, by_stem) or "ckpt help lists commands and topics"
        raise UsageError(f"no such command or topic: {topic}", hint=hint)
    text = re.sub(r"<!--.*?-->\n*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    screen = screen_of(sys.stdout)
    lines = (
        _drawn_lines(text, has_color=screen.has_color) if sys.stdout.isatty() else text.splitlines()
    )
    print_page(lines, pager_of(sys.stdout))
    return 0


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
