"""Checkpoints of many ranks: what is the same is read once and kept once. (No timing: that is
scripts/bench scale.)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from core.arrays.dtypes import itemsize
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import PlannedArray
from core.files.store import LocalStore
from core.formats.megatron import format as megatron
from core.formats.torch.format import parse
from core.formats.torch.shared_structure import PatternedFiles
from core.formats.torch.zip.tree_layout import plan_tree
from core.formats.torch.zip.tree_layouts import TreePlans
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf, as_mapping
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.prepare import prepare
from scripts.benchmarks import scale_sources as sources
from tests.support.facets import facet_of, ranks_of

N_FILES = 64
BYTES_PER_PIECE = 6 << 10
"""Of everything that is kept or made at the peak of a plan, for each array that is read or
placed.
"""


@pytest.fixture(scope="module")
def many(repo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse checkpoint of 64 rank files that hold some 3000 tensors, with a Float16
    optimizer.
    """
    tiny = sources.MODELS["tiny"]
    topology = sources.Topology(tp=1, pp=4, ep=16)
    model = sources.Model(topology, {**tiny.args, "num_experts": 32}, tiny.dense_layers)
    root = tmp_path_factory.mktemp("scale") / "many"
    sources.make(model, root, optimizer="float16")
    assert isinstance(root, Path)
    return root / "iter_0000010"


def _job(src: Path) -> Job:
    return Job(src=src, topology=TopologyChange(ep=8), is_reshard=True, optim="drop")


def test_alike_rank_files_are_parsed_once_for_each_stage(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(many)
    files = PatternedFiles(store)
    patterns = {
        id(files.read(f"{folder}/{megatron.MODEL_FILE}").pattern) for folder in store.folders()
    }
    store.close()
    assert len(store.folders()) == N_FILES
    assert len(patterns) <= 4


def test_alike_rank_files_say_what_parsing_each_says(many: Path) -> None:
    store = LocalStore(many)
    catalog = megatron.read(store)
    for coords, (folder, skeleton) in list(ranks_of(catalog).items())[::7]:
        tree = parse(store, f"{folder}/{megatron.MODEL_FILE}", prefix=f"{folder}:", coords=coords)
        assert tree.arrays
        for key, array in tree.arrays.items():
            assert catalog.fragments(key)[0].array == array
        own = as_mapping(tree.value)
        assert own is not None
        assert are_same((as_mapping(skeleton) or {})["args"], own["args"])
    store.close()


def _set(path: Path, old: bytes, new: bytes) -> None:
    """Changes a word of the file's pickle, and its CRC with it."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        pickled = archive.read(name)
    assert pickled.count(old) >= 1
    before, after = (
        zlib.crc32(text).to_bytes(4, "little") for text in (pickled, pickled.replace(old, new))
    )
    path.write_bytes(data.replace(old, new).replace(before, after))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"linear_kv_up_proj.layer_norm_weight", b"linear_kv_up_proj.layer_norm_weighs"),
        (b"num_layers", b"num_layert"),
    ],
)
def test_a_file_that_differs_otherwise_is_parsed(
    many: Path, tmp_path: Path, old: bytes, new: bytes
) -> None:
    names = sorted(path.name for path in many.iterdir())[:2]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / megatron.MODEL_FILE).write_bytes(
            (many / name / megatron.MODEL_FILE).read_bytes()
        )
    _set(tmp_path / names[1] / megatron.MODEL_FILE, old, new)
    store = LocalStore(tmp_path)
    files = PatternedFiles(store)
    first, second = (files.read(f"{name}/{megatron.MODEL_FILE}") for name in names)
    store.close()
    assert first.pattern is not second.pattern


def test_sampling_opens_one_file_of_each_stage(many: Path) -> None:
    store = LocalStore(many)
    sampled = megatron.sample(store)
    opened = len(store.opened)
    store.close()
    store_of_stages = LocalStore(many)
    full = megatron.read(store_of_stages)
    store_of_stages.close()
    assert opened == 4
    assert facet_of(sampled, RankFacts).n_unopened == N_FILES - opened
    assert facet_of(full, RankFacts).n_unopened == 0
    assert dict(sampled.tensors) == dict(full.tensors)


def test_ranks_with_equal_lists_of_their_own_share_a_pickle() -> None:
    plans = TreePlans("archive")

    def tree(rank: int, numbers: int) -> dict[object, object]:
        return {"weight": TensorLeaf(f"{rank}:weight"), "params": list(range(numbers))}

    first, second = (plans.plan(tree(rank, 200), _array) for rank in range(2))
    other = plans.plan(tree(2, 201), _array)
    assert second.pickle is first.pickle
    assert [placed.array.name for placed in second.arrays] == ["1:weight"]
    assert other.pickle == plan_tree(tree(2, 201), _array, prefix="archive").pickle != first.pickle


def test_a_deep_tree_is_planned_as_others_are() -> None:
    deep: object = 0
    for _ in range(2000):
        deep = [deep]
    plans = [
        TreePlans("archive").plan({"deep": deep, "weight": TensorLeaf("w")}, _array)
        for _ in range(2)
    ]
    assert plans[0].pickle == plans[1].pickle


def _array(key: str) -> PlannedArray:
    return PlannedArray(key, "float32", (3,))


def _peak_bytes(work: Callable[[], int]) -> tuple[int, int]:
    tracemalloc.start()
    try:
        n_pieces = work()
        return tracemalloc.get_traced_memory()[1], n_pieces
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_a_plan_takes_little_memory_for_each_piece(many: Path) -> None:
    def plan() -> int:
        with prepare(_job(many)) as prepared:
            return prepared.plan.n_fragments + len(prepared.plan.places)

    plan()  # modules and caches
    peak, n_pieces = _peak_bytes(plan)
    assert n_pieces > 3000
    assert peak / n_pieces < BYTES_PER_PIECE


def test_the_dry_run_says_what_could_not_be_less(many: Path) -> None:
    with prepare(_job(many)) as prepared:
        plan = prepared.plan
        report = prepared.as_dict()
        once = sum(
            piece.n_elements * itemsize(plan.match(key).dtype)
            for key in iter(plan.keys())
            for piece, _ in plan.match(key).pieces
        )
    assert plan.copy_bytes > 0
    assert report["least_read_bytes"] == plan.read_bytes - plan.copy_bytes == once


@pytest.mark.long
@pytest.mark.slow
def test_the_bench_runs_at_a_tiny_size(repo_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks",
        "scale",
        "--tiny",
        "--runs",
        "1",
        "--only",
        "weights",
    ]
    subprocess.run(
        [*command, "--scratch", tmp_path, "--json", out],
        cwd=repo_dir,
        check=True,
        capture_output=True,
    )
    result = json.loads(out.read_text())
    assert result["failures"] == []
    assert {case["unit"] for case in result["cases"]} == {"s", "MB"}


@pytest.mark.long
@pytest.mark.slow
def test_the_bench_of_launch_plans_and_divides(repo_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks",
        "launch",
        "--tiny",
        "--runs",
        "1",
        "--only",
        "balance",
    ]
    subprocess.run(
        [*command, "--scratch", tmp_path, "--json", out],
        cwd=repo_dir,
        check=True,
        capture_output=True,
    )
    result = json.loads(out.read_text())
    assert result["failures"] == []
    rows = {row["name"]: row for row in result["cases"]}
    assert rows["tiny with optimizer, EP 1: largest of 8 workers"]["is_met"]
    assert rows["plan of tiny with optimizer, EP 1: the plan file"]["result"] > 0
