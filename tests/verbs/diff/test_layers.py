"""Layers are ranked by their worst tensors."""

from __future__ import annotations

from core.engine.catalog.tensor import Tensor
from core.engine.numbers.difference import ValueDifference
from core.verbs.diff.layers import rank_layers
from core.verbs.diff.result import TensorDiff


def tensor(key: str, relative: float = 0.0, *, n_nan: int = 0) -> TensorDiff:
    """A tensor that differs by ``relative``; an equal one for 0."""
    meta = Tensor("float32", (9,))
    if not relative and not n_nan:
        return TensorDiff(key=key, kind="equal", a=meta, b=meta)
    values = ValueDifference(
        n_elements=9,
        n_differing=1,
        n_nan=n_nan,
        max_abs=10 * relative,
        square_a=1.0,
        square_delta=relative**2,
    )
    return TensorDiff(key=key, kind="values", a=meta, b=meta, values=values)


def test_the_layer_with_the_worst_tensor_comes_first() -> None:
    ranked = rank_layers(
        [
            tensor("h.0.a", 0.1),
            tensor("h.0.b", 0.1),
            tensor("h.10.a", 0.01),
            tensor("h.10.b", 0.3),
            tensor("h.2.a"),
            tensor("embed", 9.0),
        ]
    )
    assert ranked.n_layers == 3
    first, second = ranked.layers
    assert (first.name, first.n_tensors, first.worst.key) == ("h.10", 2, "h.10.b")
    assert (first.relative, first.max_abs) == (0.3, 3.0)
    assert (second.name, len(second.differing)) == ("h.0", 2)


def test_nan_on_one_side_is_worse_than_any_distance() -> None:
    ranked = rank_layers([tensor("h.0.a", 5.0), tensor("h.1.a", 0.1, n_nan=2)])
    assert [layer.name for layer in ranked.layers] == ["h.1", "h.0"]
    assert ranked.layers[0].n_nan == 2


def test_layers_of_the_optimizer_are_ranked_if_the_model_is_equal() -> None:
    state = "optimizer.state.exp_avg.decoder.layers.3"
    tensors = [tensor("decoder.layers.3.w"), tensor(f"{state}.w", 0.1)]
    assert [layer.name for layer in rank_layers(tensors).layers] == [state]
    tensors[0] = tensor("decoder.layers.3.w", 0.01)
    assert [layer.name for layer in rank_layers(tensors).layers] == ["decoder.layers.3"]


def test_equal_checkpoints_have_no_ranking() -> None:
    assert rank_layers([tensor("h.0.a"), tensor("embed", 0.1)]).layers == ()
