"""Hybrid models: what ``config.json`` and Megatron's arguments say about the kinds of layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, UnsupportedError
from core.files.store import LocalStore
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.pickle.inert import make_namespace
from tests.hf.models import arguments, assert_same, catalog_of, config_of, contents, saved, tensors

Model = tuple[LocalStore, Catalog, dict[str, Any], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Name → (store, catalog, configuration, directory) of a model."""
    root = tmp_path_factory.mktemp("hybrid")
    built: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in built:
            folder = saved(name, root / name)
            built[name] = (*catalog_of(folder), config_of(folder), folder)
        return built[name]

    return model


def test_a_published_configuration_says_the_same_as_a_list_of_kinds(
    models: Callable[[str], Model],
) -> None:
    _, source, config, _ = models("nemotron_h_moe")
    published = {name: value for name, value in config.items() if name != "layers_block_type"}
    published |= {"hybrid_override_pattern": "M*EM-E", "num_hidden_layers": 6}
    older = config | {
        "layers_block_type": [
            {"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind)
            for kind in config["layers_block_type"]
        ]
    }
    wanted = arguments(to_megatron(source, config))
    assert wanted["hybrid_override_pattern"] == "M*EM-E"
    for other in (published, older):
        fields = arguments(to_megatron(source, other))
        own = ("params_dtype", "huggingface_config")
        assert {k: v for k, v in fields.items() if k not in own} == {
            k: v for k, v in wanted.items() if k not in own
        }


@pytest.mark.parametrize("pattern", ["M-*", "M|-*", "|M-*"])
def test_a_run_of_a_newer_megatron_names_the_pattern_otherwise(
    models: Callable[[str], Model], pattern: str
) -> None:
    store, source, config, folder = models("nemotron_h")
    middle = to_megatron(source, config)
    fields = arguments(middle) | {"hybrid_layer_pattern": pattern, "huggingface_config": None}
    fields |= {"hybrid_override_pattern": None}
    back = to_hf(replace(middle, args=make_namespace(fields)))
    assert_same(contents(back, store), tensors(folder))
    kinds = json.loads(back.documents["config.json"])["layers_block_type"]
    assert kinds == config["layers_block_type"]


def test_a_run_of_mamba_alone_may_have_any_arguments_of_attention_and_mlp(
    models: Callable[[str], Model],
) -> None:
    store, source, config, folder = models("mamba2")
    middle = to_megatron(source, config)
    fields = arguments(middle) | {
        "huggingface_config": None,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "position_embedding_type": "learned_absolute",
        "swiglu": True,
        "squared_relu": True,
    }
    back = to_hf(replace(middle, args=make_namespace(fields)))
    assert_same(contents(back, store), tensors(folder))
    document = json.loads(back.documents["config.json"])
    assert document["model_type"] == "mamba2"
    assert (document["num_heads"], document["head_dim"], document["expand"]) == (8, 8, 2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemotron_h", {"layers_block_type": ["mlp", "conv", "moe"]}, "layers_block_type is"),
        ("nemotron_h", {"layers_block_type": None}, "neither layers_block_type nor hybrid_"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is True"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ("nemotron_h_moe", {"layers_block_type": ["moe"] * 6}, "shape|not in the checkpoint"),
        (
            "mamba2",
            {"time_step_limit": [0.01, 0.1]},
            "Megatron's Mamba layers have no time-step limits",
        ),
        ("mamba2", {"conv_kernel": 3}, "conv_kernel is 3"),
        ("mamba2", {"num_hidden_layers": 1 << 39}, "the checkpoint has only"),
        ("mamba2", {"n_groups": 2}, "config.json implies"),
    ],
)
def test_a_configuration_that_megatron_cannot_follow_is_refused(
    models: Callable[[str], Model], name: str, changes: dict[str, Any], message: str
) -> None:
    _, source, config, _ = models(name)
    with pytest.raises(CheckpointingException, match=message):
        to_megatron(source, config | changes)


def test_limits_of_time_steps_without_effect_are_read_however_they_are_written(
    models: Callable[[str], Model],
) -> None:
    _, source, config, _ = models("mamba2")
    for limits in ([0.0, float("inf")], (0, {"__float__": "Infinity"}), None):
        to_megatron(source, config | {"time_step_limit": limits})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MG*"}, "layers of kind 'G'"),
        ({"mtp_num_layers": 2}, "kinds of the 2 multi-token prediction layers are unknown"),
        ({"squared_relu": False}, "argument squared_relu is False, not True"),
        ({"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06"),
        ({"mamba_state_dim": None}, "argument mamba_state_dim is missing"),
    ],
)
def test_arguments_that_transformers_cannot_follow_are_refused(
    models: Callable[[str], Model], changes: dict[str, Any], message: str
) -> None:
    _, source, config, _ = models("nemotron_h")
    middle = to_megatron(source, config)
    fields = arguments(middle) | {"huggingface_config": None} | changes
    with pytest.raises(UnsupportedError, match=message):
        to_hf(replace(middle, args=make_namespace(fields)))
