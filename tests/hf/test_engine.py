"""Renamed and fused tensors through the real plan and copy, into the files of real formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import ReplicaMismatchError
from core.files.store import LocalStore
from core.formats.format import Format
from core.formats.megatron import format as megatron
from core.formats.safetensors import format as safetensors
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from core.opening.target import partitioned
from core.publish.manifest.of_copy import finish_files
from core.publish.stage.protocol import StageRequest
from core.publish.stage.stage import Stage
from tests.hf.models import (
    assert_same,
    bytes_of,
    config_of,
    contents,
    loaded_model,
    logits,
    saved,
    tensors,
)
from tests.megatron.support.megatron_gold import RULES

NAMES = (
    "llama_tied",
    "llama_biased",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe_mixed",
    "deepseek_v3",
)


def copied(
    format: Format, source: Catalog, target: TargetCatalog, store: LocalStore, dst: Path
) -> Path:
    """The files of a target catalog, made by the engine."""
    assert format.lay_out is not None
    plan = make_plan(source, target, format.lay_out(target), threads=1)
    with Stage(dst, StageRequest(fsync=False)) as stage:
        result = execute(
            plan, store, stage.store, CopyOptions(item_bytes=1 << 12, buffer_bytes=1 << 12)
        )
        finish_files(plan, result, stage.store)
        stage.commit()
    return dst


@pytest.mark.parametrize("name", NAMES)
def test_a_model_goes_to_rank_files_and_comes_back_to_what_transformers_runs(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    store = LocalStore(folder)
    source = safetensors.FORMAT.read(store)
    middle = to_megatron(source, config_of(folder))
    ranks = shard(middle, Topology(tp=2, pp=3), rules=RULES)
    ranks_path = copied(megatron.FORMAT, middle, ranks, store, tmp_path / "ranks") / "iter_0000001"
    rank_store = LocalStore(ranks_path)
    back = to_hf(unshard(megatron.read(rank_store), rules=RULES))
    target = partitioned(back, format="safetensors", by="whole")
    ours = copied(safetensors.FORMAT, back, target, rank_store, tmp_path / "ours")
    assert_same(tensors(ours), tensors(folder))
    assert config_of(ours)["model_type"] == config_of(folder)["model_type"]
    assert torch.equal(logits(loaded_model(ours)), logits(loaded_model(folder)))


def test_a_copy_of_tied_embeddings_that_differs_is_found(tmp_path: Path) -> None:
    folder = saved("qwen2_tied", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[77, 5] += 1
    save_file(
        {**weights, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    store = LocalStore(folder)
    middle = to_megatron(safetensors.FORMAT.read(store), config_of(folder))
    ranks = shard(middle, Topology(tp=2), rules=RULES)
    with pytest.raises(ReplicaMismatchError, match="word_embeddings") as caught:
        copied(megatron.FORMAT, middle, ranks, store, tmp_path / "ranks")
    hint = caught.value.hint or ""
    assert "tie_word_embeddings in config.json" in hint and "rank" not in hint


def test_pieces_that_torch_wrote_of_parts_are_put_together(golden: Path, tmp_path: Path) -> None:
    """Two ranks' shards of every projection: FSDP cuts them without regard for heads and groups."""
    folder = golden / "torch_dcp" / "hf_storage_dp2"
    store = LocalStore(folder)
    source = safetensors.FORMAT.read(store)
    config = config_of(golden / "hf" / "llama" / "safetensors_single") | {"num_hidden_layers": 2}
    middle = to_megatron(source, config)
    assert len(middle.fragments("decoder.layers.0.mlp.linear_fc1.weight")) == 4
    ranks_path = copied(
        megatron.FORMAT,
        middle,
        shard(middle, Topology(tp=2), rules=RULES),
        store,
        tmp_path / "ranks",
    )
    rank_store = LocalStore(ranks_path / "iter_0000001")
    back = to_hf(unshard(megatron.read(rank_store), rules=RULES))
    assert_same(
        contents(back, rank_store), tensors(golden / "torch_dcp" / "hf_storage_consolidated_dp2")
    )


def test_pieces_of_fused_tensors_are_cut_where_ranks_meet(tmp_path: Path) -> None:
    """Four TP ranks, each with one of the four query groups."""
    folder = saved("llama_wide_heads", tmp_path / "model")
    store = LocalStore(folder)
    middle = to_megatron(safetensors.FORMAT.read(store), config_of(folder))
    ranks_path = copied(
        megatron.FORMAT,
        middle,
        shard(middle, Topology(tp=4), rules=RULES),
        store,
        tmp_path / "ranks",
    )
    rank_store = LocalStore(ranks_path / "iter_0000001")
    ranks = unshard(megatron.read(rank_store), rules=RULES)
    assert len(ranks.fragments("decoder.layers.0.self_attention.linear_qkv.weight")) == 4
    back = to_hf(ranks)
    ours = copied(
        safetensors.FORMAT,
        back,
        partitioned(back, format="safetensors", by="whole"),
        rank_store,
        tmp_path / "ours",
    )
    assert_same(tensors(ours), tensors(folder))
    wanted = load_file(folder / "model.safetensors")["model.layers.2.self_attn.v_proj.weight"]
    assert (tensors(ours)["model.layers.2.self_attn.v_proj.weight"] == bytes_of(wanted)).all()
