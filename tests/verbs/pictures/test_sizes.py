"""Sums of bytes by module, and how repeated modules are folded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.opening.open import open_checkpoint
from core.verbs.inspect.summary import summarize
from core.verbs.pictures.sizes import SizeNode, fold_sizes, sizes_of
from tests.support.ties import tied


def catalog_of(**shapes: tuple[int, ...]) -> Catalog:
    tensors = {key: Tensor("uint8", shape) for key, shape in shapes.items()}
    return Catalog("torch", None, tensors)


def lines(node: SizeNode, depth: int = 0) -> Iterator[tuple[int, str, int, int]]:
    yield depth, node.name, node.n_bytes, node.n_tensors
    for child in node.children:
        yield from lines(child, depth + 1)


@pytest.mark.parametrize(
    "name",
    [
        "mcore_legacy/dense_gqa/tp2_pp2_optim",
        "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
        "hf/llama/safetensors_sharded",
        "torch_dcp/fsdp2_dp2",
    ],
)
def test_sums_are_those_of_the_summary(name: str, golden: Path) -> None:
    checkpoint = open_checkpoint(golden / name)
    summary = summarize(checkpoint)
    model, optimizer = sizes_of(summary.view)
    checkpoint.store.close()
    assert model.n_bytes + optimizer.n_bytes == summary.total.n_bytes
    assert model.n_tensors + optimizer.n_tensors == summary.total.n_tensors
    assert (optimizer.n_bytes > 0) == (summary.optimizer is not None)
    for root in (model, optimizer):
        assert fold_sizes(root).n_bytes == root.n_bytes


def test_model_and_optimizer_are_separate_trees() -> None:
    model, optimizer = sizes_of(
        catalog_of(**{"a.weight": (3,), "a.bias": (1,), "optimizer.state.exp_avg.a.weight": (6,)})
    )
    assert list(lines(model)) == [
        (0, "", 4, 2), (1, "a", 4, 2), (2, "weight", 3, 1), (2, "bias", 1, 1)
    ]  # fmt: skip
    assert (optimizer.n_bytes, optimizer.n_tensors) == (6, 1)


def test_tied_tensor_has_no_bytes_of_its_own() -> None:
    assert sizes_of(tied(catalog_of(a=(4,), b=(4,)), {"b": "a"}))[0].n_bytes == 4


def test_equal_layers_fold_whatever_their_order() -> None:
    model, _ = sizes_of(
        catalog_of(
            **{
                "layers.0.w": (2,), "layers.0.b": (1,),
                "layers.1.b": (1,), "layers.1.w": (2,),
                "layers.2.w": (5,), "layers.2.b": (1,),
            }
        )
    )  # fmt: skip
    assert list(lines(fold_sizes(model))) == [
        (0, "", 12, 6),
        (1, "layers", 12, 6),
        (2, "[0-1]", 6, 4), (3, "w", 4, 2), (3, "b", 2, 2),
        (2, "2", 6, 2), (3, "w", 5, 1), (3, "b", 1, 1),
    ]  # fmt: skip


def test_few_numbered_names_stay_apart() -> None:
    model, _ = sizes_of(catalog_of(w1=(1,), w2=(1,), w3=(1,)))
    assert [child.name for child in fold_sizes(model).children] == ["w1", "w2", "w3"]


def test_tensor_that_is_also_a_module_counts_once() -> None:
    model, _ = sizes_of(catalog_of(**{"a": (1,), "a.b": (2,)}))
    assert list(lines(fold_sizes(model))) == [(0, "", 3, 2), (1, "a", 3, 2), (2, "b", 2, 1)]
