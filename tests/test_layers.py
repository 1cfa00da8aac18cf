"""The layers of DESIGN: who may import whom, read from the source by ``ast``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "core",
        "core.errors",
        "core.arrays.dtypes",
        "core.arrays.fast_value",
        "core.arrays.box",
        "core.pickle.inert",
        "core.device.device",
        "core.files.url",
    ),
    (
        *(
            "core.catalog.catalog",
            "core.checks.finding",
            "core.megatron.model.topology",
            "core.megatron.model.pipeline",
            "core.megatron.model.version",
            "core.megatron.model.stages",
            "core.catalog.optimizer_keys",
            "core.files.store",
            "core.files.substitute",
            "core.catalog.file_image",
            "core.catalog.key_patterns",
            "core.files.sandbox",
            "core.files.syscalls",
            "core.files.network_mounts",
            "core.stated",
            "core.numbers.kinds",
            "core.numbers.facts",
            "core.numbers.difference",
            "core.numbers.tally",
            "core.diff.entries",
            "core.catalog.planned_store",
        ),
        *(
            "core.catalog.stored",
            "core.catalog.decoded",
            "core.files.json_object",
            "core.team.threads",
            "core.team.protocol",
        ),
        *("core.team.agreement", "core.team.figures", "core.device_*"),
        *("core.pickle.reader", "core.pickle_*", "core.pickle.known_packages"),
        *("core.live.tensors", "core.live.share"),
        *("core.fingerprint.definition", "core.fingerprint.kernel", "core.fingerprint.sums"),
        *(
            "core.pickle.key_text",
            "core.pickle.nesting",
            "core.pickle.cycles",
            "core.pickle.plain",
            "core.arrays.cast",
            "core.arrays.checksum",
            "core.arrays.coverage",
            "core.arrays.gather",
        ),
    ),
    (
        *("core.arrays.sharding", "core.megatron.reshard.reshard", "core.formats", "core.formats.*", "core.layout_*"),
        *(
            "core.opening.objects",
            "core.opening.pickled_places",
            "core.formats.torch.other_pickles",
            "core.changes.select",
            "core.opening.target",
        ),
        *("core.optim_*", "core.inspect.tree", "core.inspect.preview"),
        *(
            "core.hf",
            "core.hf.*",
            "core.changes.quantize",
            "core.quantize_*",
            "core.changes.restack",
            "core.changes.rename",
            "core.changes.tie",
        ),
        *("core.convert.nesting_notes", "core.catalog.mapping_attributes"),
        "core.convert.job",
    ),
    (
        *(
            "core.plan.box_reader",
            "core.opening.canonical",
            "core.opening.open",
            "core.opening.unrecognised",
            "core.plan.plan",
            "core.plan.match",
            "core.plan.positions",
            "core.plan.addresses",
            "core.plan.items",
            "core.convert.stored_plan.division",
            "core.copy.interleave",
        ),
    ),
    (
        *("core.copy.run", "core.copy.worker", "core.copy.output", "core.copy.ledger"),
        *(
            "core.convert.stored_plan.codec",
            "core.convert.stored_plan.file",
            "core.convert.workers.share",
            "core.stage.workers_lock",
        ),
        *(
            "core.stage.files",
            "core.stage.folder_lock",
            "core.files.folders",
            "core.stage.stale",
            "core.stage.replacement",
        ),
        *("core.stage.stage", "core.stage.journal", "core.manifest.of_copy", "core.stage.existing"),
        *(
            "core.manifest.fingerprint_feeds",
            "core.manifest.fingerprint_read",
            "core.manifest.fingerprint_share",
            "core.manifest.file",
            "core.manifest.lookup",
        ),
        *("core.scan.run", "core.scan_*", "core.manifest.stated_crcs", "core.checks.content.replica_difference"),
        *("core.calibration.choice", "core.calibration.trials"),
    ),
    (
        *(
            "core.convert.apply_changes",
            "core.convert.options",
            "core.convert.sizes",
            "core.convert.stage",
            "core.opening.source_files",
            "core.convert.global_form",
            "core.convert.target_form",
        ),
        "core.inspect.capabilities",
        *("core.convert.run", "core.convert.workers.run", "core.convert.contract", "core.inspect.summary"),
        *("core.convert.explain", "core.convert.verify", "core.convert.hard_links"),
        *("core.manifest.fingerprint_copy", "core.checks.comparison"),
        *("core.live.load", "core.live.save"),
    ),
    (
        *("core.checks", "core.checks.*", "core.validate.run"),
        *("core.checks.watch", "core.manifest.inventory"),
        *("core.diff.run", "core.diff_*"),
        *("core.validate.accepted", "core.validate.newest", "core.checks.plan_request"),
    ),
    ("core.dist_checkpointing", "core.dist_checkpointing.*", "ckpt_cli", "ckpt_cli.*"),
)
"""From the bottom to the top. A module imports from its own layer and from those below; ``.*`` and ``_*`` stand for all
names that begin so."""

DOORS = ("ckpt_cli", "core.dist_checkpointing")

FAMILIES: dict[str, tuple[str, ...]] = {
    "torch": (),
    "megatron": ("torch",),
    "hf": (),
    "mcore": ("torch",),
    "safetensors": ("torch", "hf"),
    "bin": ("torch", "hf"),
    "dcp": ("torch", "safetensors", "mcore"),
    "torch_dist": ("dcp", "torch", "mcore"),
    "zarr": ("torch", "mcore"),
    "zarr3": ("torch", "zarr"),
    "ocdbt": ("zarr",),
    "deepspeed": ("torch",),
}
"""Format family → the containers that its files hold. A module belongs to the longest name that its own begins with:
``torch_zip`` and ``torch_file`` to ``torch``. DCP and Megatron files hold torch zips, DCP's may hold safetensors;
torch_dist is a DCP directory with Megatron's files beside it, as zarr may be; Orbax keeps zarr arrays in OCDBT. ``hf``
and ``mcore`` are no formats: what lies around Hugging Face's weights, and what Megatron's backends share."""

HEAVY = frozenset({"ml_dtypes", "numpy", "rich", "safetensors", "tensorstore", "torch", "zarr", "zstandard"})
LIGHT = {"core": frozenset({"xxhash", "zlib_ng"}), "ckpt_cli": frozenset({"typer"})}
"""What a package may import at module level beside the standard library."""


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


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file, for all of core and ckpt_cli."""
    found = {}
    for package in ("core", "ckpt_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        found for name, path in modules().items() for found in _imports_of(name, ast.parse(path.read_text("utf-8")))
    )


def _imports_of(importer: str, tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, is_run: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, alias.name, is_run, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{importer}:{child.lineno}: a relative import"
                base = child.module or ""
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    yield Import(importer, whole if whole in modules() else base, is_run, child.lineno)
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


def _fits(module: str, pattern: str) -> bool:
    return module.startswith(pattern[:-1]) if pattern.endswith("*") else module == pattern


@cache
def layer_of(module: str) -> int:
    """The layer of one of our modules; the most exact row wins.

    Raises:
        LookupError: no row names it.
    """
    rows = [(len(row), layer) for layer, names in enumerate(LAYERS) for row in names if _fits(module, row)]
    if not rows:
        raise LookupError(
            f"{module} is in no layer: add it to LAYERS in tests/test_layers.py (and to DESIGN, if it is new there)"
        )
    return max(rows)[1]


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("core", "ckpt_cli")


def test_every_row_and_family_is_of_a_module() -> None:
    rows = [row for names in LAYERS for row in names if not row.startswith("core.dist_checkpointing")]
    assert [row for row in rows if not any(_fits(module, row) for module in modules())] == []
    used = {_family_of(module) for module in modules() if module.startswith("core.formats.")}
    assert used == set(FAMILIES)


def test_every_module_is_in_a_layer() -> None:
    missing = []
    for module in modules():
        try:
            layer_of(module)
        except LookupError as err:
            missing.append(str(err))
    assert missing == []


def test_no_module_imports_from_a_layer_above() -> None:
    assert [
        str(found)
        for found in imports()
        if _is_ours(found.imported) and layer_of(found.imported) > layer_of(found.importer)
    ] == []


def test_what_is_imported_of_ours_exists() -> None:
    assert [str(found) for found in imports() if _is_ours(found.imported) and found.imported not in modules()] == []


def test_imports_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        if found.is_run and _is_ours(found.imported) and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("door", "other"), [DOORS, DOORS[::-1]])
def test_the_two_doors_do_not_import_each_other(door: str, other: str) -> None:
    assert [
        str(found) for found in imports() if found.importer.startswith(door) and found.imported.startswith(other)
    ] == []


def test_core_does_not_import_the_command_line() -> None:
    assert [
        str(found) for found in imports() if found.importer.startswith("core") and found.imported.startswith("ckpt_cli")
    ] == []


def test_only_the_bridge_knows_both_sharded_tensors_and_what_the_engine_works_with() -> None:
    engine = {f"core.{name}" for name in ("catalog", "copy", "live", "live_load", "live_save", "plan", "share")}
    used: dict[str, set[str]] = {name: set() for name in modules() if name.startswith("core.dist_checkpointing")}
    for found in imports():
        if found.is_run and found.importer in used:
            used[found.importer].add(found.imported)
    assert [name for name, names in used.items() if "core.dist_checkpointing.mapping" in names and names & engine] == [
        "core.dist_checkpointing._engine.bridge"
    ]


def test_the_readme_names_every_module_of_the_documented_api() -> None:
    readme = (ROOT / "core" / "README.md").read_text("utf-8")
    section = readme[readme.index("## How a running job") : readme.index("## How an optimizer")]
    names = [name.removeprefix("core.dist_checkpointing.") for name in modules() if name.startswith(f"{DOORS[1]}.")]
    last = {name.rpartition(".")[2] for name in names} - {"strategies"}
    assert sorted(name for name in last if f"`{name}`" not in section and f"/{name}`" not in section) == []


def _family_of(module: str) -> str:
    """Family of a module of core.formats: the longest name in FAMILIES that it begins with."""
    name = module.removeprefix("core.formats.")
    families = [family for family in FAMILIES if name == family or name.startswith(f"{family}_")]
    assert families, f"{module} is of no format family: add it to FAMILIES in tests/test_layers.py"
    return max(families, key=len)


def test_a_format_imports_no_other_format_save_the_containers_it_nests() -> None:
    wrong = []
    unused = {(family, other) for family, others in FAMILIES.items() for other in others}
    for found in imports():
        if found.importer.startswith("core.formats.") and found.imported.startswith("core.formats."):
            mine, other = _family_of(found.importer), _family_of(found.imported)
            unused.discard((mine, other))
            if other != mine and other not in FAMILIES[mine]:
                wrong.append(str(found))
    assert wrong == []
    assert unused == set()


def test_heavy_modules_are_imported_inside_functions_only() -> None:
    wrong = []
    for found in imports():
        top = found.imported.split(".")[0]
        if not found.is_run or _is_ours(top) or top in sys.stdlib_module_names:
            continue
        if found.importer.startswith("core.dist_checkpointing"):
            continue
        if top in HEAVY or top not in LIGHT[found.importer.split(".")[0]]:
            wrong.append(str(found))
    assert wrong == []


def test_core_neither_prints_nor_exits_nor_reads_the_environment() -> None:
    wrong = []
    for module, path in modules().items():
        if not module.startswith("core"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            what = None
            if isinstance(node, ast.Call):
                what = {"print": "prints", "input": "asks", "exit": "exits", "sys.exit": "exits"}.get(
                    ast.unparse(node.func)
                )
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "sys.argv"):
                what = f"reads {ast.unparse(node)}"
            if what:
                wrong.append(f"{module}:{node.lineno} {what}")
    assert wrong == []
