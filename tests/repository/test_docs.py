"""The documents: links lead somewhere, what they name exists, and every page is found from the
menu.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DECISIONS = sorted(ROOT.glob("docs/decisions/[0-9]*.md"))

_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_PATH = re.compile(r"`(?P<path>(?:core|ckpt_cli|scripts|tests|docs)/[\w./{},*-]+)")
_CITED = re.compile(r"(?P<page>docs/[\w./-]+\.md)(?: (?P<section>\d+(?:\.\d+)?)\b)?")


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """The anchors of a page: its headings, spelled as code hosts do, and those that it sets
    itself.
    """
    text = text_of(path)
    anchors = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchors.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return frozenset(anchors)


def expanded(pattern: str) -> Iterator[str]:
    """The paths that ``a/{b,c}.py`` stands for."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    for part in match[1].split(","):
        yield from expanded(pattern[: match.start()] + part + pattern[match.end() :])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_oldest_python_is_the_same_everywhere() -> None:
    (oldest,) = re.findall(r'requires-python = ">=(.+)"', text_of(ROOT / "pyproject.toml"))
    named = {
        f"{name_of(path)}: {version}"
        for path in (*PAGES, ROOT / "scripts/setup")
        for version in re.findall(r"Python (3\.\d+) or (?:newer|later)", text_of(path))
    }
    assert len(named) > 3
    assert {text.partition(": ")[2] for text in named} == {oldest}, sorted(named)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_every_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    broken = []
    for match in _LINK.finditer(_FENCED.sub("", text_of(page))):
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        is_there = path.exists() and (
            path.is_relative_to(ROOT / "docs") or not page.is_relative_to(ROOT / "docs")
        )
        if not is_there or (anchor and path.suffix == ".md" and anchor not in anchors_of(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_files_and_scripts_that_a_page_names_exist(page: Path) -> None:
    named = {match["path"].rstrip(".,") for match in _PATH.finditer(text_of(page))}
    assert (
        sorted(
            path
            for name in named
            for path in expanded(name)
            if not any(ROOT.glob(path.rstrip("/")))
        )
        == []
    )


def test_the_menu_has_every_page_once() -> None:
    def pages(entries: list[object]) -> Iterator[str]:
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            elif isinstance(entry, dict):
                for part in entry.values():
                    yield from pages(part if isinstance(part, list) else [part])

    menu = list(pages(yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]))
    assert sorted(menu) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")
    )


def test_what_the_code_cites_is_in_the_documents() -> None:
    missing = []
    for folder in ("core", "ckpt_cli", "docs/examples", "scripts", "tests"):
        for path in sorted(ROOT.glob(f"{folder}/**/*")):
            if (
                path.suffix not in (".py", ".toml", "")
                or not path.is_file()
                or path == Path(__file__)
            ):
                continue
            for match in _CITED.finditer(text_of(path)):
                page = ROOT / match["page"]
                section = match["section"]
                if not page.exists() or (
                    section and not re.search(rf"^#+ {section}\.? ", text_of(page), re.MULTILINE)
                ):
                    missing.append(f"{name_of(path)}: {match[0]}")
    assert missing == []


def test_no_heading_stands_twice_on_a_page_and_no_paragraph_on_two() -> None:
    # The reference of commands is generated: an option is on the page of each of its commands.
    pages = [page for page in PAGES if page.name != "commands.md"]
    pages_of: dict[str, list[str]] = {}
    for page in pages:
        prose = _FENCED.sub("", text_of(page))
        headings = re.findall(r"^#+ .+$", prose, re.MULTILINE)
        assert len(set(headings)) == len(headings), name_of(page)
        for paragraph in re.split(r"\n\s*\n", prose):
            words = " ".join(paragraph.split())
            if len(words) >= 120 and not words.startswith("|"):
                pages_of.setdefault(words, []).append(name_of(page))
    assert [(words, names) for words, names in pages_of.items() if len(names) > 1] == []


def test_every_page_is_on_the_first_one() -> None:
    linked = {match["target"] for match in _LINK.finditer(text_of(ROOT / "docs/index.md"))}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages - linked if not page.startswith("decisions/0")} == {"index.md"}


def test_decisions_are_numbered_and_listed() -> None:
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", text_of(ROOT / "docs/decisions/README.md"))
    assert listed == [path.name for path in DECISIONS]
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for path in DECISIONS:
        headings = re.findall(r"^## (.+)$", text_of(path), re.MULTILINE)
        assert headings == ["Question", "Choice", "Why", "What would change it"], path.name
        assert text_of(path).startswith(f"# {int(path.name[:4])}. ")


def test_the_architecture_names_every_package() -> None:
    text = text_of(ROOT / "docs/explanation/architecture.md")
    section = text.partition("## The packages")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    named = re.findall(r"`(core\.\w+|ckpt_cli)`", "\n".join(row.split("|")[2] for row in rows))
    packages = {path.parent.name for path in ROOT.glob("core/*/__init__.py")}
    assert sorted(named) == sorted(
        {"ckpt_cli", "core.errors", *(f"core.{package}" for package in packages)}
    )
