"""From Hugging Face's names through Megatron's files of several ranks, and back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.facets import HuggingFaceModel
from core.files.store import LocalStore
from core.formats.dcp import torch_dist
from core.formats.megatron import format as megatron
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.objects import loaded
from tests.hf.models import (
    FAMILIES,
    MODELS,
    assert_same,
    catalog_of,
    config_of,
    contents,
    saved,
    tensors,
)
from tests.megatron.support.megatron_gold import RULES, filled
from tests.support.covering import every_third
from tests.support.facets import facet_of
from tests.support.materialize import Bytes, write_files

TOPOLOGIES = (Topology(tp=1), Topology(tp=2), Topology(tp=2, pp=3))
EXPERTS = (Topology(tp=2, ep=2), Topology(ep=4, pp=3), Topology(tp=2, ep=2, etp=1))


@pytest.mark.each_value
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", every_third(FAMILIES))
def test_rank_files_of_a_model_make_the_same_model(
    name: str, topology: Topology, tmp_path: Path
) -> None:
    _through_rank_files(name, topology, tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize("topology", EXPERTS, ids=str)
@pytest.mark.parametrize(
    "name",
    """
    mixtral qwen2_moe qwen3_moe_mixed deepseek_v2 deepseek_v3 deepseek_v32 qwen3_next_mixed
    qwen3_5_moe glm4_moe glm4_moe_lite gpt_oss olmoe minimax_m2 nemotron_h_moe ernie4_5_moe
    hy_v3 exaone_moe dots1_moe
    """.split(),
)
def test_expert_parallel_rank_files_make_the_same_model(
    name: str, topology: Topology, tmp_path: Path
) -> None:
    _through_rank_files(name, topology, tmp_path)


def _through_rank_files(name: str, topology: Topology, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), make_vocab_size_divisible_by=16)
    target = shard(middle, topology, rules=RULES)
    ours = _written(target, filled(target, middle, store), tmp_path / "ranks") / "iter_0000001"
    back = unshard(megatron.read(LocalStore(ours)), rules=RULES)
    model = to_hf(back)
    assert facet_of(model, HuggingFaceModel).model_type == MODELS[name][0]
    assert_same(contents(model, LocalStore(ours)), tensors(folder))


def test_both_ways_tell_which_megatron_rotates_other_channels_of_the_indexer(
    tmp_path: Path,
) -> None:
    folder = saved("deepseek_v32", tmp_path / "model")
    middle = to_megatron(catalog_of(folder)[1], config_of(folder), make_vocab_size_divisible_by=16)
    for result in (middle, to_hf(replace(middle, notes=()))):
        assert any("since megatron-core 0.19" in note for note in result.notes)


@pytest.mark.parametrize("name", every_third(FAMILIES, start=1))
def test_a_torch_dist_checkpoint_of_a_model_makes_the_same_model(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), make_vocab_size_divisible_by=16)
    stacked = to_torch_dist(middle, Topology(tp=2), rules=RULES)
    ours = _written(
        stacked.target, filled(stacked.target, stacked.source, store), tmp_path / "dist"
    )
    ours_store = LocalStore(ours)
    read = loaded(torch_dist.read(ours_store), ours_store)
    model = to_hf(unshard(read, rules=RULES))
    assert_same(contents(model, ours_store), tensors(folder))


def _written(target: TargetCatalog, arrays: Mapping[str, Bytes], folder: Path) -> Path:
    """The files of a target catalog, put together without the engine."""
    lay_out = (torch_dist if target.format == "torch_dist" else megatron).FORMAT.lay_out
    assert lay_out is not None
    content = {name: data.tobytes() for name, data in arrays.items()}
    files: dict[str, bytes] = {}
    for image in lay_out(target):
        image_bytes = bytearray(image.size)
        placed = [(piece.offset, content[piece.array.name]) for piece in image.arrays]
        for offset, data in (*placed, *image.literals(lambda name: zlib.crc32(content[name]))):
            image_bytes[offset : offset + len(data)] = data
        files[image.path] = bytes(image_bytes)
    return write_files(files, folder)
