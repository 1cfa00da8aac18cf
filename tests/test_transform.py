"""core.transform: choosing, renaming and casting without data."""

from __future__ import annotations

import pytest

from core.box import whole
from core.catalog import Catalog, StoredArray, StoredObject, TensorMeta, catalog_of_arrays
from core.errors import UsageError
from core.inert import TensorLeaf
from core.transform import cast_of, is_optimizer_key, rename, select


def _catalog() -> Catalog:
    keys = ["model.a.weight", "model.b.bias", "optim.state.0.exp_avg"]
    return catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (2, 3)) for key in keys},
        objects={"optim.lr": StoredObject("optim.lr", value=0.1), "note": StoredObject("note", value="x")},
        skeleton={
            "model": {"a.weight": TensorLeaf(keys[0]), "b.bias": TensorLeaf(keys[1])},
            "optim": {"state": {0: {"exp_avg": TensorLeaf(keys[2])}}, "lr": 0.1},
            "note": "x",
        },
    )


def test_include_and_exclude_choose_tensors_and_objects_and_prune_the_skeleton() -> None:
    chosen = select(_catalog(), include=["model.*", "note"], exclude=["*.bias"])
    assert list(chosen.catalog.tensors) == ["model.a.weight"]
    assert list(chosen.catalog.objects) == ["note"]
    assert chosen.catalog.skeleton == {"model": {"a.weight": TensorLeaf("model.a.weight")}, "note": "x"}
    assert chosen.left_out == ("model.b.bias", "optim.state.0.exp_avg", "optim.lr")


@pytest.mark.parametrize(("include", "exclude"), [(["nothing.*"], []), ([], ["typo*"]), (["note"], [])])
def test_globs_that_choose_nothing_are_errors(include: list[str], exclude: list[str]) -> None:
    with pytest.raises(UsageError):
        select(_catalog(), include=include, exclude=exclude)


def test_rename_moves_keys_and_skeleton_leaves() -> None:
    made, changed = rename(_catalog(), [(r"^model\.", ""), (r"exp_avg$", "m")])
    assert changed == [
        ("model.a.weight", "a.weight"),
        ("model.b.bias", "b.bias"),
        ("optim.state.0.exp_avg", "optim.state.0.m"),
    ]
    assert made.skeleton == {
        "a.weight": TensorLeaf("a.weight"),
        "b.bias": TensorLeaf("b.bias"),
        "optim": {"state": {0: {"m": TensorLeaf("optim.state.0.m")}}, "lr": 0.1},
        "note": "x",
    }
    (fragment,) = made.fragments("a.weight")
    assert fragment.key == "a.weight"
    assert fragment.box == whole((2, 3))
    assert fragment.array is not None
    assert fragment.array.name == "model.a.weight"


@pytest.mark.parametrize(
    "rules", [[("(", "x")], [("absent", "x")], [(r".*", "same")], [(r"^model\.a\.weight$", "")], [("model", r"\9")]]
)
def test_renames_that_cannot_be_are_errors(rules: list[tuple[str, str]]) -> None:
    with pytest.raises(UsageError):
        rename(_catalog(), rules)


def test_plain_dtype_casts_only_the_model_and_globs_reach_everything() -> None:
    def meta(key: str, dtype: str = "float32") -> TensorMeta:
        return TensorMeta(key, dtype, (1,))

    plain = cast_of([(None, "bf16")])
    assert plain(meta("model.a.weight")) == "bfloat16"
    assert plain(meta("optimizer.state.exp_avg.a")) == "float32"
    assert plain(meta("decoder.layers.0.mlp.router.expert_bias")) == "float32"
    assert plain(meta("steps", "int64")) == "int64"
    assert plain(meta("w", "float8_e4m3fn")) == "float8_e4m3fn"
    both = cast_of([(None, "bf16"), ("*.expert_bias", "float16"), ("optimizer.*", "float64")])
    assert both(meta("decoder.layers.0.mlp.router.expert_bias")) == "float16"
    assert both(meta("optimizer.state.exp_avg.a")) == "float64"


@pytest.mark.parametrize(
    "key", ["optimizer.state.exp_avg.a", "app.optim.state.w.exp_avg_sq", "optim.param_groups.0.lr", "x.exp_avg"]
)
def test_optimizer_keys_are_recognised(key: str) -> None:
    assert is_optimizer_key(key)


def test_model_keys_are_not_optimizer_keys() -> None:
    assert not is_optimizer_key("model.layers.0.optimus.weight")
    assert not is_optimizer_key("decoder.layers.0.mlp.linear_fc1.weight")
