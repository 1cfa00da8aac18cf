"""How code reads: docstrings are sentences, variables say their role, and a class name stands for
one thing.

The rules, with examples, are in docs/adding/style.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
_NOUN_CLAUSE = """
The A An Whether What Where Which How Every All Who Why See As One Those That Bytes Number Several
Names
"""
NOUN_CLAUSE = frozenset(_NOUN_CLAUSE.split())
_VAGUE = """
found made one ones said seen mine here there held what which everybody known left told
"""
VAGUE = frozenset(_VAGUE.split())
PRONOUN_ONLY = re.compile(r"^ +(?:\w+, )*\w+: (?:it|they|them|one)\.$", re.MULTILINE)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted([*(REPO / "core").rglob("*.py"), *(REPO / "ckpt_cli").rglob("*.py")]):
        name = str(path.relative_to(REPO))
        yield name, ast.parse(path.read_text("utf-8"))


MODULES = list(modules())
EACH_MODULE = [pytest.param(name, tree, id=name) for name, tree in MODULES]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [node.id for node in function.decorator_list if isinstance(node, ast.Name)]
    return "property" in names or "cached_property" in names


@pytest.mark.parametrize(("name", "tree"), EACH_MODULE)
def test_docstrings_of_functions_begin_with_a_verb(name: str, tree: ast.Module) -> None:
    wrong = []
    for function in functions(tree):
        text = ast.get_docstring(function) or ""
        first = text.split()[0].strip("`.,:;") if text.split() else ""
        if not is_property(function) and (first in NOUN_CLAUSE or first.startswith("(")):
            wrong.append(f"{name}:{function.lineno} {function.name}: {text.splitlines()[0]}")
    assert wrong == []


@pytest.mark.parametrize(("name", "tree"), EACH_MODULE)
def test_arguments_are_described_by_more_than_a_pronoun(name: str, tree: ast.Module) -> None:
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    assert [match.group(0) for text in texts for match in PRONOUN_ONLY.finditer(text)] == []


@pytest.mark.parametrize(("name", "tree"), EACH_MODULE)
def test_variables_are_named_after_their_role(name: str, tree: ast.Module) -> None:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {
        id(node.target)
        for of_class in classes
        for node in of_class.body
        if isinstance(node, ast.AnnAssign)
    }
    names = [
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in fields
    ]
    stored = [node for node in names if isinstance(node.ctx, ast.Store)]
    assert [f"{name}:{node.lineno} {node.id}" for node in stored if node.id in VAGUE] == []


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in MODULES:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
