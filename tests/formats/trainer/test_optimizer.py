"""Names of numbered parameters: the orders and divisions that fit decide, and doubt gives none."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from core.formats.trainer.optimizer import named_numbers, read_module_orders

LLAMA = {
    "lm_head.weight": (48, 16),
    "model.embed_tokens.weight": (48, 16),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (10, 2)
        for name, shape in {
            "input_layernorm": (16,),
            "mlp.down_proj": (16, 24),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "post_attention_layernorm": (16,),
            "self_attn.k_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "self_attn.q_proj": (16, 16),
            "self_attn.v_proj": (8, 16),
        }.items()
    },
    "model.norm.weight": (16,),
}
LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
IN_ORDER = (
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{name}.weight" for layer in (2, 10) for name in LAYER),
    "model.norm.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize("model_type", ["llama", None])
def test_a_llama_is_known_by_its_configuration_or_by_its_modules(model_type: str | None) -> None:
    shapes = [[LLAMA[name] for name in IN_ORDER]]
    result = named_numbers(LLAMA, shapes, is_ordered=False, model_type=model_type)
    assert result is not None
    assert result.groups == (IN_ORDER,)


def test_groups_keep_the_order_where_their_shapes_tell_the_parameters() -> None:
    every_second = (IN_ORDER[1::2], IN_ORDER[::2])
    shapes = [[LLAMA[name] for name in group] for group in every_second]
    assert named_numbers(LLAMA, shapes, is_ordered=False, model_type="llama") is None
    by_axes = tuple(
        tuple(name for name in IN_ORDER if (len(LLAMA[name]) > 1) is is_matrix)
        for is_matrix in (True, False)
    )
    shapes = [[LLAMA[name] for name in group] for group in by_axes]
    result = named_numbers(LLAMA, shapes, is_ordered=False, model_type="llama")
    assert result is not None
    assert result.groups == by_axes


def test_a_wrong_shape_gives_no_names() -> None:
    shapes = [[LLAMA[name] for name in IN_ORDER]]
    shapes[0][3] = (16, 8)
    assert named_numbers(LLAMA, shapes, is_ordered=False, model_type="llama") is None


def test_frozen_parameters_are_found_only_where_shapes_tell_them_apart() -> None:
    model = {"a.weight": (2, 3), "b.weight": (4, 3), "c.weight": (2, 3)}
    named = named_numbers(model, [[(4, 3)]], is_ordered=True, model_type=None)
    assert named is not None
    assert named.groups == (("b.weight",),)
    assert named_numbers(model, [[(2, 3)]], is_ordered=True, model_type=None) is None


def test_a_model_of_no_family_needs_shapes_that_allow_one_order() -> None:
    model = {"head.weight": (5, 3), "body.bias": (3,), "body.weight": (3, 4)}
    result = named_numbers(model, [[(3, 4), (3,), (5, 3)]], is_ordered=False, model_type="my_own")
    assert result is not None
    assert result.groups == (("body.weight", "body.bias", "head.weight"),)
    twins = {"head.weight": (3, 4), "body.weight": (3, 4)}
    assert named_numbers(twins, [[(3, 4), (3, 4)]], is_ordered=False, model_type=None) is None


def test_a_model_with_too_many_orders_gives_no_names() -> None:
    model = {f"module_{chr(97 + i)}.weight": (i + 1, 2) for i in range(9)}
    shapes = [list(model.values())]
    assert named_numbers(model, shapes, is_ordered=False, model_type=None) is None


def test_parameters_without_state_fit_any_shape() -> None:
    model = {"a.weight": (2, 3), "b.weight": (4, 3)}
    result = named_numbers(model, [[None, (4, 3)]], is_ordered=True, model_type=None)
    assert result is not None
    assert result.groups == (("a.weight", "b.weight"),)


def test_every_family_of_the_table_lists_a_module_once() -> None:
    assert {"llama", "qwen3_moe", "gpt2", "bert", "t5"} <= read_module_orders().keys()
    for tree in read_module_orders().values():
        for names in tree.values():
            assert len(set(names)) == len(names)


def order_in_transformers(model_type: str) -> dict[str, tuple[int, ...]]:
    """Return parameter → shape of a small model of transformers, in its order; tied ones once."""
    config = AutoConfig.for_model(model_type)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 2)
    with suppress(AttributeError):  # of some, it follows from the number of layers
        config.layer_types = config.layer_types[:2]
    auto = next(
        kind
        for kind in (
            AutoModelForCausalLM,
            AutoModelForMaskedLM,
            AutoModelForSeq2SeqLM,
            AutoModelForImageTextToText,
            AutoModelForCTC,
            AutoModelForImageClassification,
            AutoModel,
        )
        if type(config) in kind._model_mapping
    )
    with torch.device("meta"):
        model = auto.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ("llama", "gpt2", "bert") else pytest.mark.long)
        for name in read_module_orders()
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_table_has_the_order_of_transformers(model_type: str) -> None:
    shapes = order_in_transformers(model_type)
    alphabetical = dict(sorted(shapes.items()))
    result = named_numbers(
        alphabetical, [list(shapes.values())], is_ordered=False, model_type=model_type
    )
    assert result is not None
    assert result.groups == (tuple(shapes),)
