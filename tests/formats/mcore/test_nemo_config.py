"""Checkpoints of NeMo 1, whose training arguments stand in ``model_config.yaml``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from core.errors import UnsupportedError
from core.megatron.model.args import fields_of
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.archives import unpacked
from tests.support.rank_files import assert_same_bits

LLAMA = {
    "mcore_gpt": True,
    "encoder_seq_length": 4096,
    "max_position_embeddings": "${.encoder_seq_length}",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-6,
    "bias": False,
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "transformer_engine": True,
    "tokenizer": {"library": "sentencepiece", "model": "nemo:1f3a_tokenizer.model"},
    "precision": "bf16",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama that megatron-core saved for NeMo 2, in directories of unpacked archives."""
    folder = tmp_path_factory.mktemp("nemo")
    nemo = unpacked("nemo2", folder)
    run(Job(src=nemo / "llama", dst=folder / "truth", to="hf", vocab_size=128, fsync=False))
    shutil.rmtree(nemo / "llama/context")
    for to in ("torch_dist", "zarr"):
        job = Job(
            src=nemo / "llama/weights",
            dst=folder / to / "model_weights",
            to=to,
            optim="drop",
            strip_prefix=("module.",),
            add_prefix="model.",
            fsync=False,
        )
        run(job)
        (folder / to / "model_config.yaml").write_text(yaml.safe_dump(LLAMA))
    return folder


@pytest.fixture
def gpt(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved``."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["torch_dist", "zarr", "torch_dist/model_weights"])
def test_the_arguments_come_from_the_configuration_beside(name: str, gpt: Path) -> None:
    catalog = open_checkpoint(gpt / name).catalog
    assert {key.partition(".")[0] for key in catalog.tensors} == {"model"}
    expected = {
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 8,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "padded_vocab_size": 128,
        "transformer_impl": "transformer_engine",
    }
    fields = fields_of(catalog.args)
    assert {name: fields[name] for name in expected} == expected
    assert str(fields["params_dtype"]) == "torch.bfloat16"
    assert "taken from model_config.yaml (NeMo 1)" in "\n".join(catalog.notes)


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
def test_a_model_becomes_one_of_transformers_through_ranks(name: str, gpt: Path) -> None:
    truth = load_file(gpt / "truth/model.safetensors")
    topology = TopologyChange(tp=2, pp=2)
    job = Job(src=gpt / name, dst=gpt / "ranks", to="megatron", topology=topology, vocab_size=128)
    run(job)
    for source in (name, "ranks"):
        dst = gpt / "hf" / source
        run(Job(src=gpt / source, dst=dst, to="hf", vocab_size=128, fsync=False))
        tensors = load_file(gpt / "hf" / source / "model.safetensors")
        assert tensors.keys() == truth.keys()
        for key, tensor in truth.items():
            assert_same_bits(tensors[key], tensor, key)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"normalization": "layernorm1p"},
            {"apply_layernorm_1p": True, "normalization": "LayerNorm"},
        ),
        ({"activation": "squared-relu"}, {"squared_relu": True, "swiglu": False}),
        ({"activation": "gelu"}, {"bias_gelu_fusion": True, "gated_linear_unit": False}),
        ({"activation": "fast-geglu"}, {"gated_linear_unit": True, "swiglu": False}),
        ({"activation": "swiglu", "openai_gelu": True}, {"swiglu": False, "openai_gelu": True}),
        ({"ffn_hidden_size": None}, {"ffn_hidden_size": 128}),
        ({"scale_positional_embedding": True}, {"use_rope_scaling": True}),
        ({"num_moe_experts": 8}, {"num_experts": 8}),
        ({"bias": ...}, {"add_bias_linear": True}),
        (
            {"share_embeddings_and_output_weights": ...},
            {"untie_embeddings_and_output_weights": False},
        ),
    ],
)
def test_fields_mean_what_nemo_makes_of_them(
    changes: dict[str, object], expected: dict[str, object], gpt: Path
) -> None:
    config = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (gpt / "torch_dist/model_config.yaml").write_text(yaml.safe_dump(config))
    fields = fields_of(open_checkpoint(gpt / "torch_dist").catalog.args)
    assert {name: fields[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: &b [1]\nc: *b", "aliases"),
        ("num_layers: 2", "num_attention_heads is missing or not a positive integer"),
        (yaml.safe_dump({**LLAMA, "mcore_gpt": False}), "mcore_gpt is false"),
    ],
)
def test_a_file_that_cannot_be_used_is_noted(text: str, reason: str, gpt: Path) -> None:
    (gpt / "torch_dist/model_config.yaml").write_text(text)
    catalog = open_checkpoint(gpt / "torch_dist").catalog
    assert catalog.args is None
    assert reason in "\n".join(catalog.notes)


@pytest.mark.parametrize("activation", ["reglu", "fast-geglu"])
def test_a_gate_that_no_family_has_is_no_model_of_hugging_face(activation: str, gpt: Path) -> None:
    config = yaml.safe_dump(LLAMA | {"activation": activation})
    (gpt / "torch_dist/model_config.yaml").write_text(config)
    with pytest.raises(UnsupportedError, match="glu_activation"):
        run(Job(src=gpt / "torch_dist", dst=gpt / "hf", to="hf", vocab_size=128, fsync=False))
    ranks = TopologyChange(tp=2)
    run(Job(src=gpt / "torch_dist", dst=gpt / "r", to="megatron", topology=ranks, vocab_size=128))


@pytest.mark.parametrize(
    ("field", "value"), [("activation", "mish-glu"), ("normalization", "low_precision_layernorm")]
)
def test_an_unknown_activation_or_norm_is_not_guessed(field: str, value: str, gpt: Path) -> None:
    (gpt / "torch_dist/model_config.yaml").write_text(yaml.safe_dump(LLAMA | {field: value}))
    catalog = open_checkpoint(gpt / "torch_dist").catalog
    assert catalog.args is None and any(value in note for note in catalog.notes)
