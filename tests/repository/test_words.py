"""How code reads: docstrings are sentences, variables say their role, and a class name stands for
one thing.

The rules, with examples, are in docs/adding/style.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Nodes = Mapping[str, list[ast.AST]]
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


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [node.id for node in function.decorator_list if isinstance(node, ast.Name)]
    return "property" in names or "cached_property" in names


def test_docstrings_of_functions_begin_with_a_verb(nodes: Nodes) -> None:
    wrong = []
    for name, nodes_of_module in nodes.items():
        for function in nodes_of_module:
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            text = ast.get_docstring(function) or ""
            first = text.split()[0].strip("`.,:;") if text.split() else ""
            if not is_property(function) and (first in NOUN_CLAUSE or first.startswith("(")):
                wrong.append(f"{name}:{function.lineno} {function.name}: {text.splitlines()[0]}")
    assert wrong == [], "\n".join(wrong)


def test_arguments_are_described_by_more_than_a_pronoun(nodes: Nodes) -> None:
    wrong = [
        f"{name}:{node.lineno} {node.name}: {match[0]}"
        for name, nodes_of_module in nodes.items()
        for node in nodes_of_module
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for match in PRONOUN_ONLY.finditer(ast.get_docstring(node) or "")
    ]
    assert wrong == [], "\n".join(wrong)


def test_variables_are_named_after_their_role(nodes: Nodes) -> None:
    nodes_of_tests = {
        path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    wrong = []
    for name, nodes_of_module in {**nodes, **nodes_of_tests}.items():
        fields = {
            id(node.target)
            for of_class in nodes_of_module
            if isinstance(of_class, ast.ClassDef)
            for node in of_class.body
            if isinstance(node, ast.AnnAssign)
        }
        wrong += [
            f"{name}:{node.lineno} {node.id}"
            for node in nodes_of_module
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in VAGUE
            and id(node) not in fields
        ]
    assert wrong == [], "\n".join(wrong)


def test_a_class_name_stands_for_one_class(nodes: Nodes) -> None:
    places: dict[str, list[str]] = {}
    for name, nodes_of_module in nodes.items():
        for node in nodes_of_module:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
