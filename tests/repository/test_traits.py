"""Who wants to know something about a place or a format asks it, and does not compare its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def lines_with(pattern: str, root: Path, *, outside: str) -> Iterator[str]:
    """Yield ``path:number: line`` of the sources of core and ckpt_cli that match a pattern.

    Args:
        outside: beginning of the paths of modules that may have such lines.
    """
    for package in ("core", "ckpt_cli"):
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if re.search(pattern, line) and not name.startswith(outside):
                    yield f"{name}:{number}: {line.strip()}"


def test_only_the_module_of_urls_tests_the_type_of_a_path(repo_dir: Path) -> None:
    pattern = r"isinstance\(.*\bRemotePath\b"
    assert [*lines_with(pattern, repo_dir, outside="core/files/remote_path.py")] == []


def test_what_a_format_can_do_is_asked_of_it_and_not_told_from_its_kind(repo_dir: Path) -> None:
    pattern = (
        r"\.partition (==|!=|in|not in|is) |\.(is_mcore|nests)\b"
        r"|\b(format|kind)(\.|_)name (==|!=|in|not in) "
    )
    assert [*lines_with(pattern, repo_dir, outside="core/formats/")] == []
