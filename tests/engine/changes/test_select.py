"""core.engine.changes.select: choosing, renaming and casting without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.arrays.box import full_box
from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor
from core.engine.changes.rename import RenamedCatalog
from core.engine.changes.select import (
    add_prefix,
    build_dtype_rule,
    is_optimizer_key,
    rename,
    select,
    strip_prefix,
)
from core.engine.changes.tie import tie, untie
from core.errors import ReplicaMismatchError, UsageError
from core.files.store import MemoryStore
from core.pickle.inert import TensorLeaf
from core.verbs.convert.job import Job
from core.verbs.convert.prepare import prepare
from tests.support.facets import facet_of
from tests.support.moved import moved
from tests.support.ties import tied


def _catalog() -> Catalog:
    keys = ["model.a.weight", "model.b.bias", "optim.state.0.exp_avg"]
    return catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (2, 3), Extent("f", 0)) for key in keys},
        objects={
            "optim.lr": StoredObject("optim.lr", value=0.1),
            "note": StoredObject("note", value="x"),
        },
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
    assert chosen.catalog.skeleton == {
        "model": {"a.weight": TensorLeaf("model.a.weight")},
        "note": "x",
    }
    assert chosen.excluded == ("model.b.bias", "optim.state.0.exp_avg", "optim.lr")


@pytest.mark.parametrize(
    ("include", "exclude"), [(["nothing.*"], []), ([], ["typo*"]), (["note"], [])]
)
def test_globs_that_choose_nothing_are_errors(include: list[str], exclude: list[str]) -> None:
    with pytest.raises(UsageError):
        select(_catalog(), include=include, exclude=exclude)


def test_a_glob_in_the_hint_names_nothing_else() -> None:
    keys = ["app.model.w", "app.model.v", "app.step", "app.optim.state.w.exp_avg"]
    catalog = catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys},
    )
    with pytest.raises(UsageError) as caught:
        select(catalog, include=["optimizer.*"])
    # All that the model's tensors share is shared by the optimizer's too.
    assert "the model is" not in str(caught.value.hint)


def test_rename_moves_keys_and_skeleton_leaves() -> None:
    result = rename(_catalog(), [(r"^model\.", ""), (r"exp_avg$", "m")])
    renamed, changed = result.catalog, list(result.renamed)
    assert changed == [
        ("model.a.weight", "a.weight"),
        ("model.b.bias", "b.bias"),
        ("optim.state.0.exp_avg", "optim.state.0.m"),
    ]
    assert renamed.skeleton == {
        "a.weight": TensorLeaf("a.weight"),
        "b.bias": TensorLeaf("b.bias"),
        "optim": {"state": {0: {"m": TensorLeaf("optim.state.0.m")}}, "lr": 0.1},
        "note": "x",
    }
    (fragment,) = renamed.fragments("a.weight")
    assert fragment.box == full_box((2, 3))
    assert fragment.array is not None
    assert fragment.array.name == "model.a.weight"


@pytest.mark.parametrize(
    "rules",
    [
        [("(", "x")],
        [("absent", "x")],
        [(r".*", "same")],
        [(r"^model\.a\.weight$", "")],
        [("model", r"\9")],
    ],
)
def test_renames_that_cannot_be_are_errors(rules: list[tuple[str, str]]) -> None:
    with pytest.raises(UsageError):
        rename(_catalog(), rules)


def test_plain_dtype_casts_only_the_model_and_globs_reach_everything() -> None:
    vector = Tensor("float32", (1,))
    plain = build_dtype_rule([(None, "bf16")])
    assert plain("model.a.weight", vector) == "bfloat16"
    assert plain("optimizer.state.exp_avg.a", vector) == "float32"
    assert plain("decoder.layers.0.mlp.router.expert_bias", vector) == "float32"
    assert plain("steps", Tensor("int64", (1,))) == "int64"
    assert plain("w", Tensor("float8_e4m3fn", (1,))) == "float8_e4m3fn"
    both = build_dtype_rule(
        [(None, "bf16"), ("*.expert_bias", "float16"), ("optimizer.*", "float64")]
    )
    assert both("decoder.layers.0.mlp.router.expert_bias", vector) == "float16"
    assert both("optimizer.state.exp_avg.a", vector) == "float64"


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.state.exp_avg.a",
        "app.optim.state.w.exp_avg_sq",
        "optim.param_groups.0.lr",
        "x.exp_avg",
        "optimizer_0.param_groups.0.lr",
    ],
)
def test_optimizer_keys_are_recognised(key: str) -> None:
    assert is_optimizer_key(key)


def test_model_keys_are_not_optimizer_keys() -> None:
    assert not is_optimizer_key("model.layers.0.optimus.weight")
    assert not is_optimizer_key("decoder.layers.0.mlp.linear_fc1.weight")


def _prefixed() -> Catalog:
    keys = [
        "model.a.weight",
        "b",
        "optimizer.state.model.a.weight.exp_avg",
        "optimizer.state.other.exp_avg",
    ]
    catalog = catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (2, 3), Extent("f", 0)) for key in keys},
        objects={
            "model.a._extra_state": StoredObject("model.a._extra_state", value=None),
            "optimizer.lr": StoredObject("optimizer.lr", value=0.1),
            "iteration": StoredObject("iteration", value=3),
        },
        skeleton={
            "model.a.weight": TensorLeaf(keys[0]),
            "b": TensorLeaf("b"),
            "optimizer": {
                "state": {
                    "model.a.weight": {"exp_avg": TensorLeaf(keys[2])},
                    "other": {"exp_avg": TensorLeaf(keys[3])},
                },
                "lr": 0.1,
            },
            "model.a._extra_state": None,
            "iteration": 3,
        },
    )
    return catalog.with_facet(MegatronModel(order=tuple(keys[:2])))


def test_a_prefix_goes_from_keys_optimizer_entries_objects_and_skeleton() -> None:
    result = strip_prefix(_prefixed(), ["model."])
    stripped, changed = result.catalog, list(result.renamed)
    assert changed == [
        ("model.a.weight", "a.weight"),
        ("optimizer.state.model.a.weight.exp_avg", "optimizer.state.a.weight.exp_avg"),
        ("model.a._extra_state", "a._extra_state"),
    ]
    assert stripped.skeleton == {
        "a.weight": TensorLeaf("a.weight"),
        "b": TensorLeaf("b"),
        "optimizer": {
            "state": {
                "a.weight": {"exp_avg": TensorLeaf("optimizer.state.a.weight.exp_avg")},
                "other": {"exp_avg": TensorLeaf("optimizer.state.other.exp_avg")},
            },
            "lr": 0.1,
        },
        "a._extra_state": None,
        "iteration": 3,
    }
    assert facet_of(stripped, MegatronModel).order == ("a.weight", "b")
    assert len(stripped.fragments("a.weight")) == 1


def test_a_container_that_goes_leaves_the_optimizer_its_names() -> None:
    """A causal model of transformers has a module ``model``, in torch's container ``model``."""
    keys = [
        "model.model.w",
        "model.lm_head",
        *(f"optim.state.{n}.m" for n in ("model.w", "lm_head")),
    ]
    catalog = catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (1,), Extent("f", 0)) for key in keys},
        objects={
            "optim.param_groups.0.params": StoredObject(
                "optim.param_groups.0.params", value=["model.w", "lm_head"]
            )
        },
    )
    for changed in (
        strip_prefix(catalog, ["model."]).catalog,
        rename(catalog, [(r"^model\.", "")]).catalog,
    ):
        assert list(changed.tensors) == ["model.w", "lm_head", *keys[2:]]
        assert changed.objects["optim.param_groups.0.params"].value == ["model.w", "lm_head"]
    # A module's new name within the container is its name in the optimizer.
    changed = rename(catalog, [(r"^model\.model\.", "model.body.")]).catalog
    assert list(changed.tensors)[2] == "optim.state.body.w.m"


def test_a_prefix_comes_before_the_models_keys_only() -> None:
    result = add_prefix(_prefixed(), "net.")
    prefixed, changed = result.catalog, list(result.renamed)
    assert dict(changed) == {
        "model.a.weight": "net.model.a.weight",
        "b": "net.b",
        "optimizer.state.model.a.weight.exp_avg": "optimizer.state.net.model.a.weight.exp_avg",
        "model.a._extra_state": "net.model.a._extra_state",
    }
    back = strip_prefix(prefixed, ["net."]).catalog
    assert back.tensors == _prefixed().tensors
    assert back.skeleton == _prefixed().skeleton


def test_prefixes_go_one_after_the_other() -> None:
    arrays = {
        key: StoredArray(key, "float32", (1,), Extent("f", 0))
        for key in ("module.model.a", "module.b", "c")
    }
    stripped = strip_prefix(
        catalog_of_arrays(format="torch", arrays=arrays), ["module.", "model."]
    ).catalog
    assert list(stripped.tensors) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("prefixes", "text"),
    [
        (["absent."], "no key begins with 'absent.'"),
        ([""], "no key"),
        (["model.", "model."], "no key"),
        (["b"], "empty"),
    ],
)
def test_prefixes_that_nothing_has_are_usage_errors(prefixes: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        strip_prefix(_prefixed(), prefixes)


def test_two_keys_that_would_become_one_are_named() -> None:
    arrays = {key: StoredArray(key, "float32", (1,), Extent("f", 0)) for key in ("model.a", "a")}
    with pytest.raises(UsageError, match="'model.a' and 'a'"):
        strip_prefix(catalog_of_arrays(format="torch", arrays=arrays), ["model."])
    with pytest.raises(UsageError, match="empty"):
        add_prefix(catalog_of_arrays(format="torch", arrays=arrays), "")


def test_names_that_the_containers_cannot_hold_are_usage_errors() -> None:
    arrays = {key: StoredArray(key, "float32", (1,), Extent("f", 0)) for key in ("l.0", "l.1")}
    catalog = catalog_of_arrays(
        format="torch", arrays=arrays, skeleton={"l": [TensorLeaf("l.0"), TensorLeaf("l.1")]}
    )
    with pytest.raises(UsageError, match="nesting"):
        rename(catalog, [(r"l\.1", "l.x")])


HEAD, EMBED = "lm_head.weight", "model.embed.weight"


def _two(values: tuple[bytes, bytes], *, shared: bool = False) -> tuple[Catalog, MemoryStore]:
    arrays = {
        EMBED: StoredArray("e", "int8", (2, 3), Extent("e", 0)),
        HEAD: StoredArray(
            "e" if shared else "h", "int8", (2, 3), Extent("e" if shared else "h", 0)
        ),
        "norm": StoredArray("n", "int8", (3,), Extent("n", 0)),
    }
    catalog = catalog_of_arrays(
        format="torch",
        arrays=arrays,
        skeleton={
            "model": {"embed.weight": TensorLeaf(EMBED)},
            HEAD: TensorLeaf(HEAD),
            "norm": TensorLeaf("norm"),
        },
    )
    return tied(catalog, {HEAD: EMBED} if shared else {}), MemoryStore(
        {"e": values[0], "h": values[1], "n": bytes(3)}
    )


def test_a_tied_tensor_goes_and_every_byte_of_it_is_compared() -> None:
    catalog, store = _two((b"abcdef", b"abcdef"))
    result = tie(catalog, [(HEAD, EMBED)])
    assert list(result.tensors) == [EMBED, "norm"]
    assert result.skeleton == {
        "model": {"embed.weight": TensorLeaf(EMBED)},
        "norm": TensorLeaf("norm"),
    }
    assert moved(result, store)[EMBED] == b"abcdef"
    catalog, store = _two((b"abcdef", b"abcdeX"))
    with pytest.raises(ReplicaMismatchError, match=r"\(1, 2\)") as caught:
        moved(tie(catalog, [(HEAD, EMBED)]), store)
    assert caught.value.key == EMBED
    hint = caught.value.hint or ""
    assert "--tie" in hint and "rank" not in hint and "config.json" not in hint


def test_an_alias_is_tied_for_nothing() -> None:
    catalog, _ = _two((b"abcdef", b""), shared=True)
    result = tie(catalog, [(HEAD, EMBED)])
    assert result.ties == {}
    first, second = result.fragments(EMBED)
    assert (first.array, first.at, first.box) == (second.array, second.at, second.box)


def test_an_untied_tensor_is_a_copy_in_its_container() -> None:
    catalog, store = _two((b"abcdef", b"abcdef"))
    tied = tie(catalog, [(HEAD, EMBED)])
    result = untie(tied, [(HEAD, EMBED), ("model.again.weight", EMBED)])
    assert result.tensors[HEAD].shape == (2, 3)
    assert result.skeleton == {
        "model": {
            "embed.weight": TensorLeaf(EMBED),
            "again.weight": TensorLeaf("model.again.weight"),
        },
        HEAD: TensorLeaf(HEAD),
        "norm": TensorLeaf("norm"),
    }
    assert {
        key: data for key, data in moved(result, store).items() if key != "norm"
    } == dict.fromkeys((HEAD, EMBED, "model.again.weight"), b"abcdef")


def test_an_alias_that_is_untied_gets_bytes_of_its_own_and_others_keep_theirs() -> None:
    catalog, _ = _two((b"abcdef", b""), shared=True)
    assert untie(catalog, [(HEAD, EMBED)]).ties == {}
    assert untie(catalog, [(EMBED, HEAD)]).ties == {}
    three = tied(catalog, {HEAD: EMBED, "norm": EMBED})
    assert untie(three, [(EMBED, HEAD)]).ties == {"norm": HEAD}


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("absent", EMBED), "no such tensor"),
        ((EMBED, "absent"), "no such tensor"),
        ((EMBED, EMBED), "itself"),
        (("norm", EMBED), r"shape \(3,\), but"),
        (("wide", EMBED), "dtype float32, but"),
    ],
)
def test_ties_that_cannot_be_are_usage_errors(pair: tuple[str, str], text: str) -> None:
    arrays = {
        EMBED: StoredArray("e", "int8", (2, 3), Extent("f", 0)),
        "wide": StoredArray("w", "float32", (2, 3), Extent("f", 0)),
        "norm": StoredArray("n", "int8", (3,), Extent("f", 0)),
    }
    with pytest.raises(UsageError, match=text):
        tie(catalog_of_arrays(format="torch", arrays=arrays), [pair])


def test_what_is_there_already_is_not_untied() -> None:
    catalog, _ = _two((b"abcdef", b"abcdef"))
    for pair in ((HEAD, EMBED), (EMBED, EMBED), ("x", "absent")):
        with pytest.raises(UsageError):
            untie(catalog, [pair])


def test_choosing_keeps_the_files_beside_the_weights() -> None:
    plain = _catalog()
    catalog = replace(plain, files={"config.json": Tensor("uint8", (7,))})
    selected = select(catalog, include=["model.*"]).catalog
    assert selected.files == catalog.files
    assert rename(selected, [("model", "m")]).catalog.files == catalog.files


def test_parameter_groups_list_the_new_names() -> None:
    def made_of(parameter: str) -> Catalog:
        keys = [f"net.{parameter}", f"opt.state.{parameter}.exp_avg"]
        values: dict[str, object] = {
            "opt.param_groups.0.params": [parameter, "frozen"],
            "opt.param_groups.1.params": [0, 1],
            "opt.param_groups.0.lr": 0.1,
        }
        return catalog_of_arrays(
            format="dcp",
            arrays={key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys},
            objects={key: StoredObject(key, value=value) for key, value in values.items()},
        )

    result = rename(made_of("module.w"), [(r"module\.", "")])
    renamed, changed = result.catalog, list(result.renamed)
    assert list(renamed.tensors) == ["net.w", "opt.state.w.exp_avg"]
    assert renamed.objects["opt.param_groups.0.params"].value == ["w", "frozen"]
    assert renamed.objects["opt.param_groups.1.params"].value == [0, 1]
    assert dict(changed)["net.module.w"] == "net.w"
    same = strip_prefix(made_of("w"), ["net."]).catalog
    assert same.objects["opt.param_groups.0.params"].value == ["w", "frozen"]


@pytest.mark.parametrize(
    "change",
    [
        lambda catalog: strip_prefix(catalog, ["model.module."]),
        lambda catalog: rename(catalog, [(r"^model\.module\.", "model.")]),
        lambda catalog: rename(catalog, [(r"module\.", "")]),
    ],
)
def test_parameters_that_are_named_inside_their_container_are_followed(
    change: Callable[[Catalog], RenamedCatalog],
) -> None:
    keys = [f"model.module.{name}" for name in ("a.w", "b.w")]
    keys += [f"optimizer.state.module.{name}.exp_avg" for name in ("a.w", "b.w")]
    group = "optimizer.param_groups.0.params"
    catalog = catalog_of_arrays(
        format="dcp",
        arrays={key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys},
        objects={group: StoredObject(group, value=["module.a.w", "module.b.w"])},
    )
    changed = change(catalog).catalog
    assert list(changed.tensors)[2:] == [
        "optimizer.state.a.w.exp_avg",
        "optimizer.state.b.w.exp_avg",
    ]
    assert changed.objects[group].value == ["a.w", "b.w"]


def test_numbers_of_parameters_are_no_names() -> None:
    keys = [
        "model.list.0",
        "model.list.1",
        "optimizer.state.0.exp_avg",
        "optimizer.state.1.exp_avg",
    ]
    arrays = {key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys}
    stripped = strip_prefix(catalog_of_arrays(format="dcp", arrays=arrays), ["model."]).catalog
    assert list(stripped.tensors) == ["list.0", "list.1", *keys[2:]]


def test_a_prefix_that_stands_inside_is_told() -> None:
    arrays = {"model.module.a": StoredArray("a", "float32", (1,), Extent("f", 0))}
    with pytest.raises(UsageError, match="no key begins with") as refusal:
        strip_prefix(catalog_of_arrays(format="torch", arrays=arrays), ["module."])
    assert (
        refusal.value.hint == r"the key 'model.module.a' contains it, so use --rename 'module\.='"
    )


def test_entries_of_parameter_groups_follow_as_states_do() -> None:
    keys = ["model.w", "optimizer.state.model.w.exp_avg"]
    objects = {
        "optimizer.param_groups.model.w.lr": 0.1,
        "optimizer.param_groups.0.params": ["model.w"],
    }
    catalog = catalog_of_arrays(
        format="dcp",
        arrays={key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys},
        objects={key: StoredObject(key, value=value) for key, value in objects.items()},
    )
    stripped = strip_prefix(catalog, ["model."]).catalog
    assert list(stripped.tensors) == ["w", "optimizer.state.w.exp_avg"]
    assert list(stripped.objects) == [
        "optimizer.param_groups.w.lr",
        "optimizer.param_groups.0.params",
    ]
    assert stripped.objects["optimizer.param_groups.0.params"].value == ["w"]
    back = add_prefix(stripped, "model.").catalog
    assert list(back.tensors) == keys
    assert {key: item.value for key, item in back.objects.items()} == objects


def test_a_prefix_without_its_dot_is_refused() -> None:
    with pytest.raises(UsageError, match="begins with a dot") as refusal:
        strip_prefix(_prefixed(), ["model"])
    assert refusal.value.hint == "include the dot: --strip-prefix model."


def test_a_model_is_not_cast_to_eight_bits_without_scales() -> None:
    with pytest.raises(UsageError, match="8 bits") as caught:
        build_dtype_rule([(None, "fp8")])
    assert "--quantize" in (caught.value.hint or "")
    assert build_dtype_rule([("a", "fp8")])("a", Tensor("float32", (2,))) == "float8_e4m3fn"


def test_a_cast_of_the_model_does_not_pass_over_float8_with_scales() -> None:
    dtype_for = build_dtype_rule([(None, "bf16")], ["w", "w_scale_inv", "v"])
    with pytest.raises(UsageError, match="'w_scale_inv'") as caught:
        dtype_for("w", Tensor("float8_e4m3fn", (2, 2)))
    assert "--dequantize" in (caught.value.hint or "")
    assert dtype_for("v", Tensor("float8_e4m3fn", (2, 2))) == "float8_e4m3fn"


def test_float8_with_scales_is_not_cast_without_them() -> None:
    matrix = Tensor("float8_e4m3fn", (2, 2))
    dtype_for = build_dtype_rule([("[vw]", "bf16")], ["w", "w_scale_inv", "v"])
    assert dtype_for("v", matrix) == "bfloat16"
    with pytest.raises(UsageError, match="w_scale_inv") as caught:
        dtype_for("w", matrix)
    assert "--dequantize" in (caught.value.hint or "")
    assert (
        build_dtype_rule([("v", "bf16")], ["w", "w_scale_inv", "v"])("w", matrix) == "float8_e4m3fn"
    )
    assert build_dtype_rule([(None, "bf16")])("a.weight_scale", Tensor("float32", ())) == "float32"


def test_notes_about_tensors_that_are_left_out_leave_with_them(
    golden: Path, tmp_path: Path
) -> None:
    src = golden / "mcore_legacy/dense_gqa/tp2_pp1"
    job = Job(src=src, dst=tmp_path / "out", to="dcp", optim="drop", drop_unknown=True)
    with prepare(job) as prepared:
        assert sum("(vocabulary 300, padding removed)" in note for note in prepared.notes) == 2
    with prepare(replace(job, include=("decoder.*", "output_layer.*"))) as prepared:
        (note,) = [note for note in prepared.notes if "vocabulary" in note]
        assert note.startswith("output_layer.weight: ")
