"""Checkpoints whose training arguments stand in Megatron-Bridge's ``run_config.yaml``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import core
from core.formats.mcore.run_config import get_arguments
from core.megatron.model.args import fields_of
from core.opening.open import open_checkpoint
from tests.support.archives import unpacked


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``hf``, a model of transformers, and ``megatron``, Bridge's import of it."""
    folder = tmp_path_factory.mktemp("bridge")
    return unpacked("megatron_bridge", folder)


@pytest.fixture(scope="module")
def bridge_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a model with experts, in the local specification."""
    folder = tmp_path_factory.mktemp("bridge_moe")
    return unpacked("megatron_bridge_moe", folder)


@pytest.fixture
def copy(bridge: Path, tmp_path: Path) -> Path:
    """A copy of the iteration's directory, to change its ``run_config.yaml``."""
    target = tmp_path / "iter_0000000"
    target.mkdir()
    for path in (bridge / "megatron" / "iter_0000000").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def notes_of(path: Path) -> str:
    return "\n".join(open_checkpoint(path).catalog.notes)


def test_the_arguments_come_from_the_model_section(bridge: Path) -> None:
    fields = fields_of(open_checkpoint(bridge / "megatron").catalog.args)
    expected = {
        "num_layers": 3,
        "num_query_groups": 2,
        "group_query_attention": True,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
        "vocab_size": 130,
        "padded_vocab_size": 130,
        "tensor_model_parallel_size": 1,
        "max_position_embeddings": 64,
    }
    assert {name: fields[name] for name in expected} == expected
    assert str(fields["params_dtype"]) == "torch.float32"
    assert "run_config.yaml" in notes_of(bridge / "megatron")


@pytest.mark.parametrize("is_fused", [False, True])
def test_which_gelu_a_model_has_follows_from_the_fusion(is_fused: bool) -> None:
    gelu = {"_call_": False, "_target_": "torch.nn.functional.gelu"}
    model = {"activation_func": gelu, "bias_activation_fusion": is_fused}
    assert get_arguments(model)["bias_gelu_fusion"] is is_fused
    assert "bias_gelu_fusion" not in get_arguments({**model, "gated_linear_unit": True})


def test_what_bridge_imported_comes_back_bit_for_bit(bridge: Path, tmp_path: Path) -> None:
    core.convert(bridge / "megatron", tmp_path / "hf", to="hf")
    expected = load_file(bridge / "hf" / "model.safetensors")
    actual = load_file(tmp_path / "hf" / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())


def test_a_checkpoint_with_a_run_config_is_resharded_to_rank_files_and_back(
    bridge: Path, tmp_path: Path
) -> None:
    core.reshard(bridge / "megatron", tmp_path / "tp2", tp_new=2, pp_new=3, to="megatron")
    assert not core.validate(tmp_path / "tp2").findings
    core.convert(tmp_path / "tp2", tmp_path / "hf", to="hf")
    expected = load_file(bridge / "hf" / "model.safetensors")
    actual = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())


def test_a_model_with_experts_comes_back_through_any_layout(
    bridge_moe: Path, tmp_path: Path
) -> None:
    expected = load_file(bridge_moe / "hf" / "model.safetensors")
    source = bridge_moe / "megatron"
    core.reshard(source, tmp_path / "ranks", tp_new=2, ep_new=2, to="megatron")
    core.reshard(source, tmp_path / "dist", tp_new=1, pp_new=2, ep_new=2, to="torch_dist")
    for path in (source, tmp_path / "ranks", tmp_path / "dist"):
        target = tmp_path / "hf" / path.name
        core.convert(path, target, to="hf")
        actual = load_file(target / "model.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: [", "not valid YAML"),
        ("checkpoint: {}", "no model section"),
        ("- 1", "no model section"),
        ("model: " + "[" * 200_000, "nested more than 50 levels deep"),
        ("model: {a: &x 1, b: *x}", "aliases and merge keys"),
        ("base: {a: 1}\nmodel: {<<: {a: 1}}", "aliases and merge keys"),
        ("model: {a: !!python/object/apply:os.system [true]}", "not valid YAML"),
        ("model: {a: " + "9" * 5000 + "}", "not valid YAML"),
        ("model: {a: 1}\n#" + "x" * (1 << 20), "the limit is 1,048,576"),
    ],
    ids=["cut", "no model", "list", "deep", "alias", "merge", "python", "long number", "large"],
)
def test_a_file_that_cannot_be_used_is_noted(copy: Path, text: str, reason: str) -> None:
    (copy / "run_config.yaml").write_text(text)
    assert reason in notes_of(copy)


def test_arguments_of_the_common_state_win(copy: Path, golden: Path, tmp_path: Path) -> None:
    source = next((golden / "mcore0161_torch_dist").rglob("common.pt")).parent
    target = tmp_path / source.name
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "run_config.yaml").write_bytes((copy / "run_config.yaml").read_bytes())
    assert "run_config.yaml" not in notes_of(target)
