"""core.megatron.optimizer.sharded.buckets: what ranks hold, told from global tensors alone, is what
their files list.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from core.engine.catalog.catalog import Catalog
from core.megatron.model.args import parse_facts
from core.megatron.model.topology import Topology, rank_dir
from core.megatron.optimizer.sharded.buckets import Holdings
from core.megatron.placement.chunk import find_chunk
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import TensorLeaf, as_mapping
from tests.megatron.support.kinds import (
    KINDS,
    all_built,
    dist_catalog,
    dist_tensors,
    files,
    topology_of,
)
from tests.megatron.support.megatron_gold import RULES, dist_files, rank_files
from tests.support.facets import ranks_of

GOLD = [
    ("mcore_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore_torch_dist", "dense_gqa", "tp2_pp2_vpp2"),
    ("mcore_torch_dist", "dense_gqa", "tp4_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp1_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore_torch_dist", "moe_seq", "tp1_pp1"),
]


def _held(model: Catalog, args: object) -> tuple[Topology, Holdings]:
    facts = parse_facts(args, names=RULES.model_of(model.tensors))
    return facts.topology, Holdings(model, facts, RULES)


@pytest.mark.parametrize(("family", "model", "case"), GOLD)
def test_order_and_shards_are_those_of_megatrons_files(
    golden: Path, family: str, model: str, case: str
) -> None:
    _, dist = dist_files(golden, family, model, case)
    topology, holdings = _held(unshard(dist, rules=RULES, optim="drop"), dist.args)
    _, catalog = rank_files(golden, model, case)
    for rank in topology.ranks():
        folder, root = ranks_of(catalog)[topology.coords(rank)]
        listed = []
        for vp_rank in range(topology.vpp):
            entries = as_mapping(find_chunk(root, vp_rank, vpp=topology.vpp, rank=folder)) or {}
            listed += [
                (vp_rank, name, catalog.tensors[leaf.key].shape)
                for name, leaf in entries.items()
                if isinstance(leaf, TensorLeaf) and RULES.is_param(str(name))
            ]
        assert [
            (holding.vp_rank, holding.name, holding.cut.shard_shape)
            for holding in holdings.of(rank)
        ] == listed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None
    ):
        pytest.skip("megatron-core is not installed")
    return all_built(tmp_path_factory)


@pytest.mark.parametrize("name", KINDS)
def test_order_and_shards_are_those_of_megatrons_other_models(folder: Path, name: str) -> None:
    for sizes in KINDS[name].layouts:
        topology = topology_of(sizes)
        args = KINDS[name].arguments(topology)
        _, dist = dist_catalog(args, dist_tensors(folder, name, sizes))
        _, holdings = _held(unshard(dist, rules=RULES), args)
        for rank in topology.ranks():
            arrays = files(folder, name, sizes)[rank_dir(topology, rank)]
            listed = [
                (key, array.shape)
                for key, array in arrays.items()
                if isinstance(array, np.ndarray) and RULES.is_param(key)
            ]
            assert [
                (holding.name, holding.cut.shard_shape) for holding in holdings.of(rank)
            ] == listed, sizes
