from __future__ import annotations

from core.verbs.inspect.nearest import nearest_names

LAYERS = [
    f"decoder.layers.{layer}.{name}"
    for layer in range(100)
    for name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "self_attention.linear_qkv.bias")
]


def test_a_typing_error_suggests_the_name_in_the_same_layer() -> None:
    (name,) = nearest_names(LAYERS, "decoder.layers.17.self_atention.linear_qkv.bias")
    assert name == "decoder.layers.17.self_attention.linear_qkv.bias"


def test_a_layer_that_does_not_exist_suggests_one_that_does() -> None:
    names = nearest_names(LAYERS, "decoder.layers.100.mlp.linear_fc1.weight")
    assert names[0] == "decoder.layers.0.mlp.linear_fc1.weight"


def test_single_components_are_compared_with_those_of_names() -> None:
    assert (
        nearest_names(LAYERS, "linear_qvk")[0] == "decoder.layers.0.self_attention.linear_qkv.bias"
    )


def test_other_names_are_not_suggested() -> None:
    assert nearest_names(LAYERS, "no.such.key") == []
    assert nearest_names([], "a") == []
    assert nearest_names(LAYERS, "*") == []


def test_a_hundred_thousand_names_and_a_long_one_are_no_burden() -> None:
    # Hangs, if letters of all names are compared.
    names = [f"module.{'abcdefghij'[n % 10]}x{n}y.block{n}.weight" for n in range(100_000)]
    assert nearest_names(names, "module.ax0y.block0.wieght")[0] == "module.ax0y.block0.weight"
    nearest_names(names, "x" * 10_000)
