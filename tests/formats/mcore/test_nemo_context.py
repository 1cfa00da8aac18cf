"""Checkpoints of NeMo 2, whose training arguments stand in ``context/model.yaml``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import core
from core.errors import UnsupportedError
from core.megatron.model.args import fields_of
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.opening.test_config_beside import stored_tensors
from tests.support.archives import unpacked
from tests.support.rank_files import assert_same_bits


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    """A directory with the checkpoint ``llama``, and the model's parameters in ``truth``."""
    return unpacked("nemo2", tmp_path)


def notes_of(path: Path) -> str:
    return "\n".join(open_checkpoint(path).catalog.notes)


@pytest.mark.parametrize("name", ["llama", "llama/weights", "llama/weights/metadata.json"])
def test_the_arguments_come_from_the_section_config(name: str, nemo: Path) -> None:
    checkpoint = open_checkpoint(nemo / name)
    assert checkpoint.iteration == 10
    fields = fields_of(checkpoint.catalog.args)
    expected = {
        "num_layers": 2,
        "num_query_groups": 2,
        "group_query_attention": True,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "padded_vocab_size": 128,
        "tensor_model_parallel_size": 1,
    }
    assert {name: fields[name] for name in expected} == expected
    assert str(fields["params_dtype"]) == "torch.bfloat16"


def test_a_model_becomes_one_of_transformers_through_any_layout(nemo: Path) -> None:
    truth = load_file(nemo / "truth.safetensors")
    source = nemo / "llama"
    for to, topology, name in (
        ("megatron", TopologyChange(tp=2, pp=2), "ranks"),
        ("torch_dist", TopologyChange(tp=2), "dist"),
        ("hf", None, "hf/llama"),
    ):
        job = Job(src=source, dst=nemo / name, to=to, topology=topology, vocab_size=128)
        run(replace(job, fsync=False))
    for name in ("ranks", "dist"):
        core.convert(nemo / name, nemo / "hf" / name, to="hf")
    for name in ("llama", "ranks", "dist"):
        tensors = load_file(nemo / "hf" / name / "model.safetensors")
        assert len(tensors) == 21
        assert_same_bits(tensors["lm_head.weight"], truth["output_layer.weight"], name)
        for layer in range(2):
            start, wanted = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            # Two groups of two queries, a key and a value, with eight channels.
            qkv = truth[f"{wanted}self_attention.linear_qkv.weight"].view(2, 4, 8, 32)
            query = tensors[f"{start}self_attn.q_proj.weight"]
            value = tensors[f"{start}self_attn.v_proj.weight"]
            assert_same_bits(query, qkv[:, :2].reshape(32, 32), name)
            assert_same_bits(value, qkv[:, 3].reshape(16, 32), name)
            gate, up = (tensors[f"{start}mlp.{part}_proj.weight"] for part in ("gate", "up"))
            fc1 = truth[f"{wanted}mlp.linear_fc1.weight"]
            assert_same_bits(torch.cat([gate, up]), fc1, name)
            norm = tensors[f"{start}post_attention_layernorm.weight"]
            assert_same_bits(norm, truth[f"{wanted}pre_mlp_layernorm.weight"], name)


def test_the_vocabulary_without_padding_is_unknown(nemo: Path) -> None:
    with pytest.raises(UnsupportedError, match="vocabulary size is unknown"):
        core.convert(nemo / "llama", nemo / "hf", to="hf")


def test_aliases_do_not_matter_and_nothing_else_of_the_context_is_read(nemo: Path) -> None:
    context = nemo / "llama" / "context"
    (context / "io.json").write_text("{")
    text = (context / "model.yaml").read_text()
    (context / "model.yaml").write_text(f"{text}more: &a [1]\nagain: *a\n")
    assert "taken from context/model.yaml" in notes_of(nemo / "llama")


def test_llama_3_1_scales_its_rope(nemo: Path) -> None:
    path = nemo / "llama" / "context" / "model.yaml"
    text = path.read_text()
    path.write_text(text.replace("\nconfig:\n", "\nconfig:\n  scale_factor: 8.0\n", 1))
    fields = fields_of(open_checkpoint(nemo / "llama").catalog.args)
    assert (fields["use_rope_scaling"], fields["rope_scaling_factor"]) == (True, 8.0)
    more = "\nconfig:\n  scale_factor: 8.0\n  old_context_len: 4096\n"
    path.write_text(text.replace("\nconfig:\n", more, 1))
    assert "old_context_len is 4096" in notes_of(nemo / "llama")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("config: [", "not valid YAML"),
        ("model: {}", "no config section"),
        ("config: {a: !!python/object/apply:os.system [true]}", "not valid YAML"),
        ("base: {a: 1}\nconfig: {<<: {a: 1}}", "merge keys"),
        ("config: " + "[" * 1000, "nested more than 50 levels deep"),
    ],
    ids=["cut", "no config", "python", "merge", "deep"],
)
def test_a_file_that_cannot_be_used_is_noted(nemo: Path, text: str, reason: str) -> None:
    (nemo / "llama" / "context" / "model.yaml").write_text(text)
    assert reason in notes_of(nemo / "llama")


def test_an_optimizer_at_tp_2_becomes_one_that_megatron_loads(tmp_path: Path) -> None:
    source = unpacked("megatron_frameworks", tmp_path) / "nemo"
    fields = fields_of(open_checkpoint(source).catalog.args)
    assert (fields["tensor_model_parallel_size"], fields["pipeline_model_parallel_size"]) == (2, 1)
    job = Job(src=source, dst=tmp_path / "one", is_reshard=True, vocab_size=32, fsync=False)
    result = run(replace(job, topology=TopologyChange(tp=1)))
    assert result.next.endswith("--override-opt_param-scheduler --no-load-rng")

    # Every parameter has Megatron's name, and a master that rounds to it.
    folder = tmp_path / "one/iter_0000010"
    tensors = stored_tensors(folder)
    weights = {key for key in tensors if not key.startswith("optimizer.")}
    assert len(weights) == 9
    assert "embedding.word_embeddings.weight" in weights
    for key in weights:
        master = tensors[f"optimizer.state.param.{key}"]
        assert_same_bits(master.to(torch.bfloat16), tensors[key], key)

    # Megatron reads these entries of a scheduler, and the settings of the groups.
    catalog = open_checkpoint(folder).catalog
    common = catalog.common or {}
    schedule = common["opt_param_scheduler"]
    assert isinstance(schedule, dict)
    assert {"max_lr", "min_lr", "num_steps", "lr_decay_style", "wd_incr_steps"} <= schedule.keys()
    assert schedule["max_lr"] == 0.01
    assert isinstance(common["optimizer"], dict)


def test_torch_dist_of_the_same_sizes_has_megatrons_names(nemo: Path) -> None:
    core.convert(nemo / "llama", nemo / "dist", to="torch_dist")
    names = stored_tensors(nemo / "dist/iter_0000010")
    assert "decoder.final_layernorm.weight" in names
    assert not any(name.startswith("module.") for name in names)


def test_a_state_of_megatrons_scheduler_is_kept(tmp_path: Path) -> None:
    source = unpacked("megatron_frameworks", tmp_path) / "nemo"
    path = source / "weights/common.pt"
    common = torch.load(path, weights_only=False)
    state = {"max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 1, "num_steps": 9}
    state |= {"lr_decay_style": "cosine", "lr_decay_steps": 90}
    common["lr_schedulers"] = [state]
    torch.save(common, path)
    job = Job(src=source, dst=tmp_path / "one", to="torch_dist", vocab_size=32, fsync=False)
    result = run(job)
    assert "--override" not in result.next
    written = open_checkpoint(tmp_path / "one").catalog.common or {}
    assert written["opt_param_scheduler"] == state
