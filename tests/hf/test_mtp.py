"""Multi-token prediction of DeepSeek and GLM: layers beyond the last, with copies of others; of
Qwen: names of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import MissingShardError, UnknownTensorError, UnsupportedError
from core.hf.proof.comparison import find_differences
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.hf.values import ARGUMENT
from core.pickle.inert import make_namespace
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.models import (
    add_prediction,
    arguments,
    assert_same,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    saved,
    tensors,
    written,
)


@pytest.fixture(params=["deepseek_v3", "glm4_moe", "deepseek_v32", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of three layers and one for multi-token prediction, as the published files have
    it.
    """
    path = saved(request.param, tmp_path / "model")
    start = "model.layers.3."
    add_prediction(
        path,
        start,
        norms=[f"{start}{name}" for name in ("enorm", "hnorm", "shared_head.norm")],
        projection=f"{start}eh_proj",
        copies={
            f"{start}embed_tokens.weight": "model.embed_tokens.weight",
            f"{start}shared_head.head.weight": "lm_head.weight",
        },
    )
    config = config_of(path) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_layer_gets_megatrons_names_and_comes_back(folder: Path, tmp_path: Path) -> None:
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), transformer_impl="local")
    names = [name for name in middle.tensors if name.startswith("mtp.")]
    assert names[:4] == [
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.input_layernorm.weight",
    ]
    assert names[-1] == "mtp.layers.0.final_layernorm.weight"
    assert arguments(middle)["mtp_num_layers"] == 1
    assert len(middle.fragments("embedding.word_embeddings.weight")) == 2
    assert len(middle.fragments("output_layer.weight")) == 2
    back = to_hf(middle)
    assert_same(contents(back, store), tensors(folder))
    assert config_of(written(back, store, tmp_path / "ours"))["num_nextn_predict_layers"] == 1


def test_a_model_whose_extra_layer_was_left_out_is_complete_without_it(
    folder: Path, tmp_path: Path
) -> None:
    store, source = catalog_of(folder)
    remaining = {key: meta for key, meta in source.tensors.items() if "layers.3." not in key}
    middle = to_megatron(replace(source, tensors=remaining), config_of(folder))
    assert not any(name.startswith("mtp.") for name in middle.tensors)
    assert arguments(middle)["mtp_num_layers"] is None
    ours = written(to_hf(middle), store, tmp_path / "ours")
    wanted = {key: data for key, data in tensors(folder).items() if "layers.3." not in key}
    assert_same(tensors(ours), wanted)
    assert logits(loaded_model(ours)).isfinite().all()


def test_a_configuration_that_counts_layers_without_tensors_is_noted(
    folder: Path, tmp_path: Path
) -> None:
    plain = saved("deepseek_v3", tmp_path / "plain")
    _, source = catalog_of(plain)
    middle = to_megatron(source, config_of(plain) | {"num_nextn_predict_layers": 1})
    assert any("multi-token prediction" in note for note in middle.notes)
    assert arguments(middle)["mtp_num_layers"] is None


@pytest.fixture(params=["qwen3_next", "qwen3_5"])
def qwen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose layer for multi-token prediction has names of its own, as the published files
    have it; transformers neither reads nor writes it.
    """
    path = saved(request.param, tmp_path / "model")
    add_prediction(
        path,
        "mtp.layers.0.",
        norms=[f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")],
        projection="mtp.fc",
    )
    return path


def test_a_layer_with_names_of_its_own_comes_back_from_files_of_several_ranks(
    qwen: Path, tmp_path: Path
) -> None:
    _, source = catalog_of(qwen)
    middle = to_megatron(source, config_of(qwen))
    assert arguments(middle)["mtp_num_layers"] == 1
    names = [name for name in middle.tensors if name.startswith("mtp.")]
    assert names[:3] == [f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")]
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in names
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    topology = TopologyChange(tp=2, pp=3)
    run(Job(src=qwen, dst=ranks, to="megatron", topology=topology, fsync=False))
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(qwen))
    # Without the origin, the arguments state the layer under the family's own name.
    fields = {name: value for name, value in arguments(middle).items() if name != ARGUMENT}
    family = config_of(qwen)["model_type"]
    model = to_hf(replace(middle, args=make_namespace(fields)), model_type=family)
    count = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
    assert json.loads(model.documents["config.json"])[count] == 1


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_predictions_of_a_hybrid_model_consist_of_layers_that_are_numbered_through(
    n_blocks: int, tmp_path: Path
) -> None:
    # As published: *E (layers 1 and 2 of the model below) for each of two predictions, which share
    # one block or have one each. transformers neither reads nor writes them.
    path = saved("nemotron_h_moe", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(1)
    extra = {}
    for block in range(n_blocks):
        for inner in range(2):
            old, start = f"backbone.layers.{1 + inner}.", f"mtp.layers.{2 * block + inner}."
            extra |= {
                key.replace(old, start): torch.randn_like(value)
                for key, value in weights.items()
                if key.startswith(old)
            }
        first, last = f"mtp.layers.{2 * block}.", f"mtp.layers.{2 * block + 1}."
        extra |= {
            f"{first}{name}.weight": torch.randn(32).bfloat16() for name in ("enorm", "hnorm")
        }
        extra[f"{first}eh_proj.weight"] = torch.randn(32, 64).bfloat16()
        extra[f"{last}final_layernorm.weight"] = torch.randn(32).bfloat16()
    save_file(weights | extra, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(path) | {"num_nextn_predict_layers": 2}
    del config["mtp_layers_block_type"]
    config["mtp_hybrid_override_pattern"] = "*E"
    (path / "config.json").write_text(json.dumps(config))
    _, source = catalog_of(path)
    middle = to_megatron(source, config)
    start = f"mtp.layers.{n_blocks - 1}."
    names = [name for name in middle.tensors if name.startswith(start)]
    assert names[:4] == [
        *(f"{start}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")),
        f"{start}mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight",
    ]
    fields = arguments(middle)
    assert (fields["mtp_num_layers"], fields["mtp_use_repeated_layer"]) == (2, n_blocks == 1)
    assert fields["mtp_hybrid_override_pattern"] == "*E"
    assert not any("declares" in note for note in middle.notes)
    for to, ranks in (("megatron", tmp_path / "ranks"), ("torch_dist", tmp_path / "dist")):
        back = tmp_path / f"back {to}"
        topology = TopologyChange(tp=2, pp=2, ep=2)
        run(Job(src=path, dst=ranks, to=to, topology=topology, fsync=False))
        run(Job(src=ranks, dst=back, to="hf", fsync=False))
        assert_same(tensors(back), tensors(path))
        assert (back / "config.json").read_bytes() == (path / "config.json").read_bytes()
    # A newer Megatron saves one pattern for all; without the origin, it describes the layers.
    newer = fields | {
        ARGUMENT: None,
        "hybrid_layer_pattern": "/".join([str(fields["hybrid_override_pattern"]), "*E", "*E"]),
        "mtp_hybrid_override_pattern": None,
    }
    plain = to_hf(replace(middle, args=make_namespace(newer)))
    described = json.loads(plain.documents["config.json"])
    assert described["num_nextn_predict_layers"] == 2
    assert described["mtp_layers_block_type"] == ["full_attention", "moe"]
    assert not find_differences(plain.tensors, described)


def test_the_prediction_of_hy3_has_no_copies_and_another_name_of_its_last_norm(
    tmp_path: Path,
) -> None:
    path = saved("hy_v3", tmp_path / "model")
    start = "model.layers.3."
    add_prediction(
        path,
        start,
        norms=[f"{start}{name}" for name in ("enorm", "hnorm", "final_layernorm")],
        projection=f"{start}eh_proj",
    )
    config = config_of(path) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    topology = TopologyChange(tp=2, pp=3, ep=2)
    run(Job(src=path, dst=ranks, to="megatron", topology=topology, fsync=False))
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(path))
    assert (back / "config.json").read_bytes() == (path / "config.json").read_bytes()


def test_the_prediction_of_k_exaone_has_no_experts(tmp_path: Path) -> None:
    # As published; transformers neither reads nor writes it.
    path = saved("exaone_moe", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(1)
    extra = {
        f"mtp.layers.0.{key.removeprefix('model.layers.0.')}": torch.randn_like(value)
        for key, value in weights.items()
        if key.startswith("model.layers.0.")
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        extra[f"mtp.{name}.weight"] = torch.randn(32).bfloat16()
    extra["mtp.fc.weight"] = torch.randn(32, 64).bfloat16()
    save_file(weights | extra, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(path) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    middle = to_megatron(catalog_of(path)[1], config)
    names = [name for name in middle.tensors if name.startswith("mtp.")]
    assert "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight" in names
    assert not any("experts" in name or "router" in name for name in names)
    assert any("use Megatron-Bridge to build them" in note for note in middle.notes)
    for to, ranks in (("megatron", tmp_path / "ranks"), ("torch_dist", tmp_path / "dist")):
        back = tmp_path / f"back {to}"
        topology = TopologyChange(tp=2, pp=3, ep=2)
        run(Job(src=path, dst=ranks, to=to, topology=topology, fsync=False))
        run(Job(src=ranks, dst=back, to="hf", fsync=False))
        assert_same(tensors(back), tensors(path))
        assert (back / "config.json").read_bytes() == (path / "config.json").read_bytes()


def test_several_layers_that_would_share_tensors_are_refused(qwen: Path) -> None:
    _, source = catalog_of(qwen)
    second = {
        key.replace("layers.0", "layers.1"): meta
        for key, meta in source.tensors.items()
        if key.startswith("mtp.layers.0.")
    }
    with pytest.raises(UnsupportedError, match="2 multi-token prediction layers"):
        to_megatron(replace(source, tensors=source.tensors | second), config_of(qwen))


def test_an_incomplete_layer_is_refused(folder: Path) -> None:
    _, source = catalog_of(folder)
    remaining = {
        key: meta for key, meta in source.tensors.items() if key != "model.layers.3.hnorm.weight"
    }
    object.__setattr__(source, "tensors", remaining)
    with pytest.raises(MissingShardError, match=r"model\.layers\.3\.hnorm\.weight"):
        to_megatron(source, config_of(folder))


def test_layers_beyond_the_last_are_left_over_in_other_families(tmp_path: Path) -> None:
    plain = saved("llama", tmp_path / "plain")
    _, source = catalog_of(plain)
    with pytest.raises(UnknownTensorError, match=r"model\.layers\.2\."):
        to_megatron(source, config_of(plain) | {"num_hidden_layers": 2})


def test_copies_may_be_absent(folder: Path) -> None:
    store, source = catalog_of(folder)
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    remaining = {key: meta for key, meta in source.tensors.items() if key not in copies}
    object.__setattr__(source, "tensors", remaining)
    values = contents(to_hf(to_megatron(source, config_of(folder))), store)
    assert np.array_equal(values[copies[0]], values["model.embed_tokens.weight"])
