"""Checkpoints of Megatron models without training arguments, with a config.json beside.

``verl`` and ``verl_critic`` were saved by megatron-core in the layouts of verl (tests/golden).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import core
from core.errors import UnsupportedError
from core.megatron.model.args import fields_of
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.hf.models import loaded_model
from tests.support.archives import unpacked
from tests.support.rank_files import assert_same_bits, load_rank_file

STEP = "global_step_10"
V2 = f"verl/{STEP}/actor"
CRITIC = f"verl_critic/{STEP}/critic"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return unpacked("megatron_frameworks", tmp_path)


def errors_of(path: Path) -> list[str]:
    findings = validate(path, level=Level.DEEP).findings
    return [finding.message for finding in findings if finding.severity > Severity.NOTE]


def stored_tensors(*folders: Path) -> dict[str, torch.Tensor]:
    """The tensors of DCP directories, as torch reads them."""
    result: dict[str, torch.Tensor] = {}
    for folder in folders:
        reader = dcp.FileSystemReader(folder)
        metas = reader.read_metadata().state_dict_metadata
        tensors = {
            key: torch.empty(meta.size, dtype=meta.properties.dtype)
            for key, meta in metas.items()
            if isinstance(meta, dcp.metadata.TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        result |= tensors
    return result


def hugging_face(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the Qwen2 in ``verl``: two heads in two groups of four channels."""
    expected = {
        "model.embed_tokens.weight": stored["embedding.word_embeddings.weight"][:30],
        "model.norm.weight": stored["decoder.final_layernorm.weight"],
        "lm_head.weight": stored["output_layer.weight"][:30],
    }
    for layer in range(2):
        start = f"model.layers.{layer}."
        part = {
            key.removeprefix("decoder.layers."): tensor[layer]
            for key, tensor in stored.items()
            if key.startswith("decoder.layers.")
        }
        qkv = part["self_attention.linear_qkv.weight"].view(2, 3, 4, 8)
        bias = part["self_attention.linear_qkv.bias"].view(2, 3, 4)
        for number, name in enumerate("qkv"):
            expected[f"{start}self_attn.{name}_proj.weight"] = qkv[:, number].reshape(8, 8)
            expected[f"{start}self_attn.{name}_proj.bias"] = bias[:, number].reshape(8)
        gate, up = part["mlp.linear_fc1.weight"].chunk(2)
        expected |= {
            f"{start}self_attn.o_proj.weight": part["self_attention.linear_proj.weight"],
            f"{start}input_layernorm.weight": part["self_attention.linear_qkv.layer_norm_weight"],
            f"{start}post_attention_layernorm.weight": part["mlp.linear_fc1.layer_norm_weight"],
            f"{start}mlp.gate_proj.weight": gate,
            f"{start}mlp.up_proj.weight": up,
            f"{start}mlp.down_proj.weight": part["mlp.linear_fc2.weight"],
        }
    return expected


def assert_equal(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(result[name], tensor, name)


@pytest.mark.parametrize(
    "place",
    ["verl", *(pytest.param(place, marks=pytest.mark.long) for place in (f"verl/{STEP}", V2))],
)
def test_separate_directories_of_a_model_are_one_checkpoint(place: str, runs: Path) -> None:
    checkpoint = open_checkpoint(runs / place)
    assert checkpoint.path == runs / V2
    assert (checkpoint.format.name, checkpoint.iteration) == ("torch_dist", 10)
    fields = fields_of(checkpoint.catalog.args)
    sizes = [fields[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline")]
    assert sizes == [2, 2]
    assert (fields["num_layers"], fields["vocab_size"], fields["padded_vocab_size"]) == (2, 30, 32)
    notes = checkpoint.catalog.notes
    assert "were read as one checkpoint" in notes[0]
    assert notes[1] == "the training arguments were derived from huggingface/config.json"
    assert not errors_of(runs / place)


@pytest.mark.parametrize("place", ["verl", f"{V2}/model/dist_ckpt"])
def test_a_config_beside_gives_names_and_shapes(place: str, runs: Path) -> None:
    core.convert(runs / place, runs / "hf", to="hf")
    expected = hugging_face(stored_tensors(runs / V2 / "model/dist_ckpt"))
    assert_equal(load_file(runs / "hf/model.safetensors"), expected)
    config = json.loads((runs / "hf/config.json").read_text())
    assert config == json.loads((runs / V2 / "model/huggingface/config.json").read_text())


def test_the_option_gives_the_same_as_a_file_beside(runs: Path) -> None:
    bare = runs / "bare"
    shutil.copytree(runs / V2 / "model/dist_ckpt", bare)
    with pytest.raises(UnsupportedError, match="no training arguments") as caught:
        core.convert(bare, runs / "hf", to="hf")
    assert "config=FILE" in str(caught.value)
    config = runs / V2 / "model/huggingface/config.json"
    for to, name in (("hf", "hf"), ("megatron", "ranks")):
        run(Job(src=bare, dst=runs / name, to=to, config=config, fsync=False))
    expected = hugging_face(stored_tensors(bare))
    assert_equal(load_file(runs / "hf/model.safetensors"), expected)
    core.convert(runs / "ranks", runs / "again", to="hf")
    assert_equal(load_file(runs / "again/model.safetensors"), expected)


def test_an_optimizer_in_buffers_is_read_at_the_sizes_that_random_states_show(runs: Path) -> None:
    topology = TopologyChange(tp=1, pp=1)
    source = runs / "verl"
    result = run(Job(src=source, dst=runs / "one", topology=topology, is_reshard=True, fsync=False))
    stored = stored_tensors(runs / "one/iter_0000010")
    weights = [key for key in stored if not key.startswith("optimizer.")]
    assert weights
    for key in weights:
        master = stored[f"optimizer.state.param.{key}"]
        assert_same_bits(master.to(torch.bfloat16), stored[key], key)
        assert not torch.equal(master, stored[f"optimizer.state.exp_avg.{key}"])
    assert any("assuming transformer_impl local" in note for note in result.notes)


def test_a_config_that_cannot_be_used_is_noted(runs: Path) -> None:
    path = runs / V2 / "model/huggingface/config.json"
    path.write_text('{"model_type": "unheard_of"}')
    checkpoint = open_checkpoint(runs / "verl")
    assert checkpoint.catalog.args is None
    assert any("not derive the training arguments" in note for note in checkpoint.catalog.notes)
    run(Job(src=runs / "verl", dst=runs / "x.safetensors", optim="drop", fsync=False))


def test_arguments_of_the_checkpoint_count_more_than_a_config_beside(runs: Path) -> None:
    folder = runs / "llava_dist/iter_0000005"
    shutil.copytree(runs / V2 / "model/huggingface", folder / "huggingface")
    checkpoint = open_checkpoint(folder)
    assert fields_of(checkpoint.catalog.args)["vocab_size"] == 120
    assert not any("config.json" in note for note in checkpoint.catalog.notes)


def test_the_layout_of_skyrl_is_read_with_its_tracker(runs: Path) -> None:
    root = runs / "sky"
    for number in (5, 7):
        policy = root / f"global_step_{number}/policy"
        shutil.copytree(runs / V2 / "model/dist_ckpt", policy)
        shutil.copytree(runs / V2 / "model/huggingface", policy / "huggingface")
    (root / "latest_ckpt_global_step.txt").write_text("5")
    checkpoint = open_checkpoint(root)
    assert checkpoint.path == root / "global_step_5/policy"
    assert checkpoint.iteration == 5
    assert fields_of(checkpoint.catalog.args)["num_layers"] == 2


def test_one_of_several_models_must_be_chosen(runs: Path) -> None:
    step = runs / "both/global_step_10"
    shutil.copytree(runs / V2, step / "actor")
    shutil.copytree(runs / CRITIC, step / "critic")
    with pytest.raises(UnsupportedError, match="contains checkpoints") as caught:
        open_checkpoint(runs / "both")
    hint = caught.value.hint or ""
    assert "actor" in hint
    assert "critic/dist_ckpt" in hint
    assert open_checkpoint(step / "critic").path == step / "critic/dist_ckpt"


def test_weights_next_to_an_optimizer_of_another_form_are_named(runs: Path) -> None:
    (runs / CRITIC / "huggingface/model.safetensors").write_bytes(b"")
    notes = open_checkpoint(runs / CRITIC).notes
    assert "to read the weights in huggingface instead" in notes[0]
    # The bridge of newer verl saves the weights there alone.
    shutil.rmtree(runs / V2 / "model/dist_ckpt")
    checkpoint = open_checkpoint(runs / "verl")
    keys = list(checkpoint.catalog.tensors)
    assert keys and all(key.startswith("optimizer.") for key in keys)
    assert "pass model/huggingface" in checkpoint.catalog.notes[1]


def test_a_value_head_is_complete_on_every_rank(runs: Path) -> None:
    source = runs / "verl_critic"
    assert not errors_of(source)
    head = stored_tensors(runs / CRITIC / "dist_ckpt")["output_layer.weight"]
    assert head.shape == (1, 8)

    # transformers has it as a classifier with one label.
    core.convert(source, runs / "hf", to="hf")
    expected = hugging_face(stored_tensors(runs / CRITIC / "dist_ckpt"))
    expected["score.weight"] = expected.pop("lm_head.weight")
    assert_equal(load_file(runs / "hf/model.safetensors"), expected)
    config = json.loads((runs / "hf/config.json").read_text())
    assert len(config["id2label"]) == 1
    model = loaded_model(runs / "hf", config["architectures"][0].removeprefix("Qwen2"))
    assert_same_bits(model.score.weight.detach(), head, "score.weight")

    # In rank files each TP rank has it, and they are joined to one again.
    topology = TopologyChange(tp=2, pp=1)
    job = Job(
        src=source, dst=runs / "ranks", to="megatron", topology=topology, optim="drop", fsync=False
    )
    run(job)
    for rank in range(2):
        file = runs / f"ranks/iter_0000010/mp_rank_{rank:02d}/model_optim_rng.pt"
        assert_same_bits(load_rank_file(file)["model"]["output_layer.weight"], head, "head")
    assert not errors_of(runs / "ranks")
    for to, name in (("torch_dist", "dist"), ("safetensors", "one.safetensors")):
        run(Job(src=runs / "ranks", dst=runs / name, to=to, fsync=False))
    tensors = stored_tensors(runs / "dist/iter_0000010")
    assert_same_bits(tensors["output_layer.weight"], head, "torch_dist")
    assert tensors["embedding.word_embeddings.weight"].shape == (32, 8)
    tensors = load_file(runs / "one.safetensors")
    assert_same_bits(tensors["output_layer.weight"], head, "safetensors")
    assert tensors["embedding.word_embeddings.weight"].shape == (30, 8)
