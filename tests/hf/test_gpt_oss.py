"""gpt-oss: experts that stand transposed in one tensor, and MXFP4 weights of published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from core.errors import CorruptError, UnsupportedError
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.hf.models import (
    assert_same,
    bytes_of,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    saved,
    tensors,
)

EXPERTS = "model.layers.1.mlp.experts."
OURS = "decoder.layers.1.mlp.experts.local_experts.2."


def test_gate_and_up_alternate_in_the_columns_of_a_transposed_matrix(tmp_path: Path) -> None:
    folder = saved("gpt_oss", tmp_path / "model")
    store, source = catalog_of(folder)
    wanted = tensors(folder)
    middle = contents(to_megatron(source, config_of(folder), transformer_impl="local"), store)
    packed = wanted[f"{EXPERTS}gate_up_proj"][2]
    rows = np.concatenate([packed[:, 0::2], packed[:, 1::2]], axis=1).swapaxes(0, 1)
    assert np.array_equal(middle[f"{OURS}linear_fc1.weight"], rows)
    bias = wanted[f"{EXPERTS}gate_up_proj_bias"][2]
    assert np.array_equal(
        middle[f"{OURS}linear_fc1.bias"], np.concatenate([bias[0::2], bias[1::2]])
    )
    down = wanted[f"{EXPERTS}down_proj"][2].swapaxes(0, 1)
    assert np.array_equal(middle[f"{OURS}linear_fc2.weight"], down)
    sinks = middle["decoder.layers.1.self_attention.core_attention.softmax_offset"]
    assert np.array_equal(sinks, wanted["model.layers.1.self_attn.sinks"])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model with random MXFP4 experts, as published files have them: blocks and scales."""
    folder = saved("gpt_oss_groups", tmp_path / "published")
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    for key in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, n_rows, n_columns = weights.pop(key).shape
        groups = (n_experts, n_columns, n_rows // 32)
        weights[f"{key}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        weights[f"{key}_scales"] = torch.randint(118, 124, groups, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(folder) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _converted(src: Path, dst: Path, **options: Any) -> Path:
    run(Job(src=src, dst=dst, fsync=False, **options))
    return dst


def test_mxfp4_weights_are_what_transformers_makes_of_them(published: Path, tmp_path: Path) -> None:
    ours = _converted(published, tmp_path / "wide", to="hf", dequantize="bf16")
    stored = load_file(published / "model.safetensors")
    wanted = {
        key: bytes_of(value)
        for key, value in stored.items()
        if not key.endswith(("_blocks", "_scales"))
    }
    for name in (key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")):
        wide = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        wanted[name] = bytes_of(wide)
    assert_same(tensors(ours), wanted)
    assert "quantization_config" not in config_of(ours)
    theirs = AutoModelForCausalLM.from_pretrained(
        published, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert torch.equal(logits(loaded_model(ours)), logits(theirs.eval()))


def test_mxfp4_weights_become_a_megatron_model_of_two_ranks_and_come_back(
    published: Path, tmp_path: Path
) -> None:
    wide = _converted(published, tmp_path / "wide", to="hf", dequantize="bf16")
    ranks = _converted(
        published,
        tmp_path / "ranks",
        to="megatron",
        dequantize="bf16",
        topology=TopologyChange(tp=2, ep=2, pp=1),
    )
    back = _converted(ranks, tmp_path / "back", to="hf")
    assert_same(tensors(back), tensors(wide))


def test_mxfp4_weights_are_valid_and_refused_without_dequantizing(
    published: Path, tmp_path: Path
) -> None:
    assert validate(published).findings == ()
    with pytest.raises(UnsupportedError, match="MXFP4"):
        _converted(published, tmp_path / "ranks", to="megatron")
    with pytest.raises(UnsupportedError, match="MXFP4"):
        to_megatron(catalog_of(published)[1], config_of(published))


def test_scales_that_do_not_fit_are_refused(published: Path, tmp_path: Path) -> None:
    weights = load_file(published / "model.safetensors")
    weights[f"{EXPERTS}down_proj_scales"] = weights[f"{EXPERTS}down_proj_scales"][:, :3].clone()
    save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match="MXFP4 values have shape"):
        _converted(published, tmp_path / "wide", to="hf", dequantize="bf16")


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = saved("gpt_oss", tmp_path / "model")
    _, source = catalog_of(folder)
    with pytest.raises(CorruptError, match="implies"):
        to_megatron(source, config_of(folder) | {"intermediate_size": 40})
    store, source = catalog_of(folder)
    back = to_hf(to_megatron(source, config_of(folder)))
    assert_same(contents(back, store), tensors(folder))
