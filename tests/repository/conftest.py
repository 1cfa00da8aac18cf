"""The syntax trees of the program, which several tests of the repository go through."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def trees() -> Iterator[dict[str, ast.Module]]:
    """Path of every module of the program → its syntax tree.

    Parsed once, and not while tests are collected, which every worker does; forgotten after the
    last test of this folder.
    """
    paths = sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "ckpt_cli").rglob("*.py")])
    parsed = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths
    }
    assert parsed
    yield parsed
    parsed.clear()


@pytest.fixture(scope="package")
def nodes(trees: dict[str, ast.Module]) -> Iterator[dict[str, list[ast.AST]]]:
    """Path of every module of the program → all nodes of its syntax tree; to find them takes a
    second.
    """
    walked = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    yield walked
    walked.clear()
