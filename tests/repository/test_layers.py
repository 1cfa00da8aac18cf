"""What import-linter cannot say: circles of files, heavy imports, what `core` leaves to its
doors.

Who may import whom is the contracts in pyproject.toml, ``[tool.importlinter]``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAVY = frozenset(
    {
        "ml_dtypes",
        "numpy",
        "rich",
        "safetensors",
        "tensorstore",
        "textual",
        "torch",
        "zarr",
        "zstandard",
    }
)
LIGHT = {"core": frozenset({"xxhash", "zlib_ng"}), "ckpt_cli": frozenset({"typer"})}
"""What a package may import at module level beside the standard library."""

DOCUMENTED = ("core.dist_checkpointing", "core.dist_checkpointing.strategies")
"""Packages whose modules the documented API names."""


@dataclass(frozen=True)
class Import:
    """One import statement, resolved.

    Args:
        importer, imported: dotted module names; for one of ours, of a module that exists.
        is_run: it is run when the module is imported (not in a function, not for types only).
        line: line number.
    """

    importer: str
    imported: str
    is_run: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def _module_name(path: str) -> str:
    """Return the dotted name of a module of the program."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def modules(trees: dict[str, ast.Module]) -> dict[str, ast.Module]:
    """Return dotted name → syntax tree, for all of core and ckpt_cli."""
    return {_module_name(path): tree for path, tree in trees.items()}


@pytest.fixture(scope="module")
def imports(modules: dict[str, ast.Module]) -> tuple[Import, ...]:
    """Return every import statement of them."""
    return tuple(
        statement
        for name, tree in modules.items()
        for statement in _imports_of(name, tree, modules.keys())
    )


def _imports_of(importer: str, tree: ast.Module, own_modules: Collection[str]) -> Iterator[Import]:
    def visit(node: ast.AST, is_run: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, alias.name, is_run, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                for alias in child.names:
                    full_name = f"{base}.{alias.name}"
                    yield Import(
                        importer,
                        full_name if full_name in own_modules else base,
                        is_run,
                        child.lineno,
                    )
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from visit(child, False)
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for part in child.body:
                    yield from visit(ast.Module([part], []), False)
                for part in child.orelse:
                    yield from visit(ast.Module([part], []), is_run)
            else:
                yield from visit(child, is_run)

    yield from visit(tree, True)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("core", "ckpt_cli")


def test_packages_import_only_from_those_below() -> None:
    # Not the script lint-imports: it may belong to another environment than the interpreter that
    # runs this test.
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_is_imported_of_ours_exists(
    modules: dict[str, ast.Module], imports: tuple[Import, ...]
) -> None:
    assert [
        str(item) for item in imports if _is_ours(item.imported) and item.imported not in modules
    ] == []


def test_no_circle_of_files_counting_late_and_type_only_imports(
    modules: dict[str, ast.Module], imports: tuple[Import, ...]
) -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for item in imports:
        if _is_ours(item.imported) and item.imported != item.importer:
            graph[item.importer].add(item.imported)
    TopologicalSorter(graph).prepare()


def test_only_the_bridge_knows_both_sharded_tensors_and_what_the_engine_works_with(
    modules: dict[str, ast.Module], imports: tuple[Import, ...]
) -> None:
    engine = (
        "core.engine.catalog.",
        "core.engine.copy.",
        "core.dist_checkpointing._live.",
        "core.engine.plan.",
    )
    used: dict[str, set[str]] = {
        name: set() for name in modules if name.startswith("core.dist_checkpointing")
    }
    for item in imports:
        if item.is_run and item.importer in used:
            used[item.importer].add(item.imported)
    mapping = "core.dist_checkpointing.mapping"
    assert [
        name
        for name, names in used.items()
        if mapping in names and any(n.startswith(engine) for n in names)
    ] == ["core.dist_checkpointing._engine.bridge"]


def test_heavy_modules_are_imported_inside_functions_only(imports: tuple[Import, ...]) -> None:
    wrong = []
    for item in imports:
        top = item.imported.split(".")[0]
        if not item.is_run or _is_ours(top) or top in sys.stdlib_module_names:
            continue
        if item.importer.startswith("core.dist_checkpointing"):
            continue
        if item.importer.startswith("ckpt_cli.explore.") and top in ("rich", "textual"):
            continue  # imported by one command only, which cannot do without
        if top in HEAVY or top not in LIGHT[item.importer.split(".")[0]]:
            wrong.append(str(item))
    assert wrong == []


def test_core_neither_prints_nor_exits_nor_reads_the_environment(
    modules: dict[str, ast.Module],
) -> None:
    wrong = []
    for module, tree in modules.items():
        if not module.startswith("core"):
            continue
        for node in ast.walk(tree):
            action = None
            if isinstance(node, ast.Call):
                action = {
                    "print": "prints",
                    "input": "asks",
                    "exit": "exits",
                    "sys.exit": "exits",
                }.get(ast.unparse(node.func))
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "os.environ",
                "os.getenv",
                "sys.argv",
            ):
                action = f"reads {ast.unparse(node)}"
            if action:
                wrong.append(f"{module}:{node.lineno} {action}")
    assert wrong == []
