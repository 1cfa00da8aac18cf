"""Kinds of models beside the usual GPT: as megatron-core 0.16.1 itself cuts them, in every layout
from every other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from core.engine.catalog.catalog import Catalog
from core.files.store import MemoryStore
from core.megatron.model.topology import Topology, rank_dir
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import as_mapping
from tests.megatron.support.kinds import (
    KINDS,
    PAIRS,
    all_built,
    catalog_of,
    dist_catalog,
    dist_tensors,
    files,
    topology_of,
)
from tests.megatron.support.megatron_gold import RULES, filled
from tests.support.covering import covering_cases, every_third
from tests.support.facets import ranks_of
from tests.support.materialize import tensor_bytes

Sizes = tuple[int, int, int]
CASES = covering_cases(
    (pytest.param(*pair) for pair in PAIRS),
    lambda name, a, b: {"from": (name, a), "to": (name, b)},
)
"""Of each kind every layout to and from; ``--long`` has each to each."""
Held = Mapping[str, Mapping[str, np.ndarray | None]]

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_built(tmp_path_factory)


def source_of(folder: Path, name: str, sizes: Sizes) -> tuple[MemoryStore, Catalog]:
    """The global form of what megatron-core has in a layout."""
    topology = topology_of(sizes)
    store, catalog = catalog_of(
        KINDS[name].arguments(topology), topology, files(folder, name, sizes)
    )
    return store, unshard(catalog, rules=RULES)


def check_files(
    source: Catalog, store: MemoryStore, topology: Topology, wanted: Held, *, states: bool = True
) -> None:
    """The rank files of a topology have these names in this order, with these bytes."""
    target = shard(source, topology, rules=RULES)
    arrays = filled(target, source, store)  # type: ignore[arg-type]
    ranks = ranks_of(target)
    expected = {}
    for rank in topology.ranks():
        folder = rank_dir(topology, rank)
        entries = {
            name: array for name, array in wanted[folder].items() if states or array is not None
        }
        names = list(as_mapping(ranks[topology.coords(rank)][1]["model"]) or {})
        assert [name for name in names if states or "_extra_state" not in str(name)] == list(
            entries
        )
        expected |= {
            f"{folder}:model.{name}": array for name, array in entries.items() if array is not None
        }
    assert set(arrays) == set(expected)
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(("name", "a", "b"), every_third(CASES, start=0))
def test_rank_files_are_megatrons(folder: Path, name: str, a: Sizes, b: Sizes) -> None:
    store, source = source_of(folder, name, a)
    check_files(source, store, topology_of(b, name), files(folder, name, b))


@pytest.mark.parametrize(("name", "a", "b"), every_third(CASES, start=1))
def test_torch_dist_is_megatrons(folder: Path, name: str, a: Sizes, b: Sizes) -> None:
    store, source = source_of(folder, name, a)
    stacked = to_torch_dist(source, topology_of(b, name), rules=RULES)
    wanted = dist_tensors(folder, name, b)
    assert set(stacked.target.tensors) == set(wanted)
    arrays = filled(stacked.target, stacked.source, store)  # type: ignore[arg-type]
    for key, array in wanted.items():
        assert stacked.target.tensors[key].shape == array.shape
        assert tensor_bytes(stacked.source, store, key).tobytes() == array.tobytes(), key
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(
                slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True)
            )
            assert arrays[fragment.array.name].tobytes() == array[region].tobytes(), key


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name, kind in KINDS.items() for sizes in kind.layouts]
)
def test_rank_files_from_torch_dist_are_megatrons(folder: Path, name: str, sizes: Sizes) -> None:
    args = KINDS[name].arguments(Topology())
    store, catalog = dist_catalog(args, dist_tensors(folder, name, sizes))
    source = unshard(catalog, rules=RULES)
    check_files(source, store, topology_of(sizes, name), files(folder, name, sizes), states=False)


def test_layers_of_several_sizes_have_transformer_engines_names_and_back(folder: Path) -> None:
    _, source = source_of(folder, "heterogeneous", (2, 1, 1))
    fused = with_implementation(source, "transformer_engine", rules=RULES)
    # torch_dist has Transformer Engine's names whatever the implementation was.
    assert set(fused.tensors) == set(dist_tensors(folder, "heterogeneous", (1, 1, 1)))
    assert "decoder.layers.1.self_attention.layer_norm_weight" in fused.tensors
    back = with_implementation(fused, "local", rules=RULES)
    assert set(back.tensors) == set(source.tensors)
