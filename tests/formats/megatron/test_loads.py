"""megatron-core's own loader over directories that we wrote.

One process without a GPU and with one rank (gloo over an in-memory store) loads every case; it
answers with what it saw as JSON, so that this process never imports megatron-core.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TorchDistFacts, WriteOptions
from core.files.store import LocalStore
from core.formats.dcp import torch_dist
from core.opening.objects import loaded
from core.opening.target import partitioned
from tests.support.asked import asked
from tests.support.facets import with_facts
from tests.support.materialize import materialized, write_files

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = r"""
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist

# The loader calls both without asking for a GPU.
torch.cuda.synchronize = lambda *args, **kwargs: None
torch.cuda.current_device = lambda: torch.device("cpu")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy


def digest(tensor):
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def plain(value):
    "A comparable description of a loaded object."
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), digest(value)]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if hasattr(value, "__dict__") and type(value).__name__ == "Namespace":
        return {"namespace": plain(vars(value))}
    if type(value).__module__ == "numpy":
        return [str(value.dtype), value.tolist()]
    return repr(value)


def halves(key, meta):
    "The tensor as two shards along its last axis of even extent, whose data cross the chunks."
    shape = tuple(meta.global_shape)
    even = [axis for axis, extent in enumerate(shape) if extent and extent % 2 == 0]
    axis = even[-1] if even else None
    if axis is None:
        return [ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=meta.dtype))]
    local = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
    return [
        ShardedTensor.from_rank_offsets(key, torch.zeros(local, dtype=meta.dtype), (axis, rank, 2))
        for rank in range(2)
    ]


def seen(case):
    folder = case["dir"]
    tensors = dist_checkpointing.load_tensors_metadata(folder)
    whole = {
        "t:" + key: ShardedTensor.from_rank_offsets(
            key, torch.zeros(meta.global_shape, dtype=meta.dtype)
        )
        for key, meta in tensors.items()
    }
    whole |= {"o:" + key: ShardedObject.empty_from_unique_key(key) for key in case["objects"]}
    parts = {
        f"{rank}:{key}": part
        for key, meta in tensors.items()
        for rank, part in enumerate(halves(key, meta))
    }
    if case["has_common"]:
        common = dist_checkpointing.load_common_state_dict(folder)
        metadata = load_sharded_metadata(folder)
        found = dist_checkpointing.load(whole, folder)
        found_parts = dist_checkpointing.load(parts, folder)
    else:
        common, metadata = None, {}
        found = TorchDistLoadShardedStrategy().load(whole, folder)
        found_parts = TorchDistLoadShardedStrategy().load(parts, folder)
    return {
        "metadata": {
            key: [str(meta.dtype), list(meta.global_shape)] for key, meta in tensors.items()
        },
        "sharded": sorted(metadata),
        "common": plain(common),
        "tensors": {key[2:]: plain(value) for key, value in found.items() if key.startswith("t:")},
        "objects": {key[2:]: plain(value) for key, value in found.items() if key.startswith("o:")},
        "parts": {key: plain(found_parts[key]) for key in parts},
    }


cases = json.load(sys.stdin)
json.dump({name: seen(case) for name, case in cases.items()}, sys.stdout)
"""

LOADABLE = (
    "mcore0161_torch_dist/dense_gqa/tp2_pp2",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_torch_dist/dense_gelu/tp2_pp2",
    "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2",
)
"""Cases with common.pt, which 0.16.1 loads as they are."""

HEAD = ("mcore_torch_dist/dense_gqa/tp2_pp2", "mcore_torch_dist/dense_gqa/tp2_pp2_optim")
"""Cases without common.pt: 0.16.1 loads their tensors, and all of them once we wrote a common.pt.

That one without ``args``: those of the newer version name enums that 0.16.1 does not have.
"""


def catalog_of(folder: Path) -> Catalog:
    store = LocalStore(folder)
    return loaded(torch_dist.FORMAT.read(store), store)


def rewritten(source: Catalog, source_dir: Path, folder: Path, *, by: str = "as_stored") -> Path:
    target = partitioned(source, format="torch_dist", by=by)
    assert torch_dist.FORMAT.lay_out is not None
    images = torch_dist.FORMAT.lay_out(target)
    return write_files(
        materialized(images, target=target, source=source, store=LocalStore(source_dir)), folder
    )


def without_args(catalog: Catalog) -> dict[object, object]:
    return {key: value for key, value in (catalog.common or {}).items() if key != "args"}


@pytest.fixture(scope="module")
def answers(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Case name → what megatron-core saw; the original is ``<name>``, ours ``<name>:ours`` and
    ``<name>:whole``.
    """
    root = tmp_path_factory.mktemp("megatron")
    cases: dict[str, dict[str, object]] = {}
    for number, name in enumerate((*LOADABLE, *HEAD)):
        source = golden / name / "iter_0000010"
        catalog = catalog_of(source)
        objects = sorted(catalog.objects)
        has_common = name not in HEAD
        small = replace(catalog, write=WriteOptions(max_file_bytes=200_000))
        if not has_common:
            small = with_facts(
                replace(small, common=without_args(catalog)), TorchDistFacts, dialect="common_pt"
            )
        complete = rewritten(small, source, root / f"{number}-whole", by="whole")
        folders = {
            name: (source, has_common),
            f"{name}:ours": (rewritten(catalog, source, root / f"{number}-ours"), has_common),
            f"{name}:whole": (complete, True),
        }
        for case, (folder, with_common) in folders.items():
            cases[case] = {"dir": str(folder), "objects": objects, "has_common": with_common}
    answered: dict[str, dict[str, object]] = asked("-c", SCRIPT, question=cases)
    return answered


@pytest.mark.parametrize("name", (*LOADABLE, *HEAD))
@pytest.mark.parametrize("variant", ["ours", "whole"])
def test_megatron_core_loads_our_directory_as_it_loads_its_own(
    answers: dict[str, dict[str, object]], name: str, variant: str
) -> None:
    original, ours = answers[name], answers[f"{name}:{variant}"]
    for part in ("metadata", "tensors", "parts", "objects"):
        assert original[part], part
        assert ours[part] == original[part], part


@pytest.mark.parametrize("name", LOADABLE)
@pytest.mark.parametrize("variant", ["ours", "whole"])
def test_megatron_core_finds_the_same_common_state(
    answers: dict[str, dict[str, object]], name: str, variant: str
) -> None:
    assert answers[name]["common"]
    assert answers[f"{name}:{variant}"]["common"] == answers[name]["common"]
    assert answers[f"{name}:{variant}"]["sharded"] == answers[name]["sharded"]


@pytest.mark.parametrize("name", HEAD)
def test_megatron_core_0161_reads_the_common_state_of_a_newer_checkpoint_rewritten_with_common_pt(
    answers: dict[str, dict[str, object]], name: str
) -> None:
    common = answers[f"{name}:whole"]["common"]
    assert isinstance(common, dict)
    assert common["iteration"] == "10"
    assert common["checkpoint_version"] == "3.0"
