"""core.engine.changes.restack: layers along an axis or apart, without data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.facets import MegatronModel, TorchDistFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.changes.restack.layer_keys import MAX_LAYERS
from core.engine.changes.restack.stack import stack_layers
from core.engine.changes.restack.unstack import unstack_layers
from core.errors import UsageError
from core.files.store import MemoryStore
from core.pickle.inert import TensorLeaf
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes
from tests.support.ties import tied

W, S = (
    "model.layers.{}.mlp.up_proj.weight",
    "optimizer.state.model.layers.{}.mlp.up_proj.weight.step",
)
N_LAYERS = 12


def numbered(shape: tuple[int, ...], first: int) -> np.ndarray:
    return np.arange(first, first + int(np.prod(shape)), dtype="<i4").reshape(shape)


def catalog_of(tensors: Mapping[str, np.ndarray], **more: object) -> tuple[Catalog, MemoryStore]:
    arrays = {
        key: StoredArray(key, "int32", value.shape, Extent(key, 0))
        for key, value in tensors.items()
    }
    store = MemoryStore({key: value.tobytes() for key, value in tensors.items()})
    return catalog_of_arrays(format="test", arrays=arrays, **more), store  # type: ignore[arg-type]


def values(catalog: Catalog, store: MemoryStore, key: str) -> np.ndarray:
    return tensor_bytes(catalog, store, key).view("<i4")[..., 0]


@pytest.fixture
def per_layer() -> dict[str, np.ndarray]:
    """A model of some layers with their optimizer's steps, and tensors beside them."""
    tensors = {"model.embed.weight": numbered((5, 3), 900)}
    for n in range(N_LAYERS):
        tensors[W.format(n)] = numbered((2, 3), 10 * n)
        tensors[S.format(n)] = numbered((), 500 + n)
        tensors[f"model.layers.{n}.mlp.experts.7.w"] = numbered((4,), 2000 + 10 * n)
    return tensors


def test_layers_are_stacked_in_order_and_the_rest_stays(per_layer: dict[str, np.ndarray]) -> None:
    catalog, store = catalog_of(per_layer)
    result = stack_layers(catalog)
    assert (result.n_groups, result.notes) == (3, ())
    assert list(result.catalog.tensors) == [
        "model.embed.weight",
        "model.layers.mlp.up_proj.weight",
        "optimizer.state.model.layers.mlp.up_proj.weight.step",
        "model.layers.mlp.experts.7.w",
    ]
    for pattern in (W, S, "model.layers.{}.mlp.experts.7.w"):
        wanted = np.stack([per_layer[pattern.format(n)] for n in range(N_LAYERS)])
        key = pattern.replace("{}.", "")
        assert result.catalog.tensors[key] == Tensor("int32", wanted.shape)
        assert (values(result.catalog, store, key) == wanted).all()


def test_there_and_back_is_the_identity(per_layer: dict[str, np.ndarray]) -> None:
    catalog, _ = catalog_of(per_layer)
    back = unstack_layers(stack_layers(catalog).catalog).catalog
    assert set(back.tensors) == set(catalog.tensors)
    for key, meta in catalog.tensors.items():
        assert back.tensors[key] == meta
        assert list(back.fragments(key)) == list(catalog.fragments(key))


def test_back_and_there_is_the_identity_of_every_number() -> None:
    stacked = {
        "decoder.layers.a": numbered((4, 2, 3), 0),
        "decoder.layers.mlp.experts.experts.b": numbered((4, 5, 2), 100),
        "steps.layers.c": numbered((3,), 200),
        "norm": numbered((2,), 300),
    }
    catalog, store = catalog_of(stacked)
    apart = unstack_layers(catalog).catalog
    assert list(apart.tensors)[:3] == [
        "decoder.layers.0.a",
        "decoder.layers.0.mlp.experts.experts.b",
        "decoder.layers.1.a",
    ]
    assert apart.tensors["steps.layers.1.c"].shape == ()
    assert (values(apart, store, "decoder.layers.2.a") == stacked["decoder.layers.a"][2]).all()
    assert (values(apart, store, "steps.layers.1.c") == 201).all()
    back = stack_layers(apart).catalog
    assert {key: tensor.shape for key, tensor in back.tensors.items()} == {
        k: v.shape for k, v in stacked.items()
    }
    for key, wanted in stacked.items():
        assert (values(back, store, key) == wanted).all()


def test_pieces_of_a_stack_go_to_the_layers_they_hold() -> None:
    values_of_stack = numbered((4, 2, 6), 0)
    store = MemoryStore(
        {
            "left": values_of_stack[:, :, :2].tobytes(),
            "top": values_of_stack[:3, :, 2:].tobytes(),
            "one": b"",
        }
    )
    layer_array = StoredArray("one", "int32", (2, 4), Extent("one", 0))
    store.contents["one"] = bytearray(values_of_stack[3, :, 2:].tobytes())
    fragments = [
        Fragment(
            Box((0, 0, 0), (4, 2, 2)),
            StoredArray("l", "int32", (4, 2, 2), Extent("left", 0)),
            (0,) * 3,
        ),
        Fragment(
            Box((0, 0, 2), (3, 2, 4)),
            StoredArray("t", "int32", (3, 2, 4), Extent("top", 0)),
            (0,) * 3,
        ),
        Fragment(
            Box((3, 0, 2), (1, 2, 4)), layer_array, (0, 0)
        ),  # an array of one layer, an axis less
    ]
    stack = Tensor("int32", (4, 2, 6), lambda: fragments)
    apart = unstack_layers(Catalog("test", None, {"m.layers.w": stack})).catalog
    for n in range(4):
        assert (values(apart, store, f"m.layers.{n}.w") == values_of_stack[n]).all()
        assert len(apart.fragments(f"m.layers.{n}.w")) == 2


@pytest.mark.parametrize("axis", [1, 2])
def test_layers_along_another_axis_go_apart_and_together(axis: int) -> None:
    stacked = {
        "m.layers.a": np.moveaxis(numbered((4, 2, 3, 5), 0), 0, axis),
        "m.layers.b": np.moveaxis(numbered((4, 2, 6), 500), 0, axis),
        "m.layers.step": numbered((4,), 900),
    }
    stacked = {key: np.ascontiguousarray(value) for key, value in stacked.items()}
    catalog, store = catalog_of(stacked)
    apart = unstack_layers(catalog, axis=axis).catalog
    back = stack_layers(apart, axis=axis).catalog
    for key, stacked_tensor in stacked.items():
        at = axis if stacked_tensor.ndim > 1 else 0
        for n in range(4):
            layer = f"m.layers.{n}.{key.removeprefix('m.layers.')}"
            assert (
                apart.tensors[layer].shape
                == stacked_tensor.shape[:at] + stacked_tensor.shape[at + 1 :]
            )
            assert (values(apart, store, layer) == stacked_tensor.take(n, at)).all()
        assert back.tensors[key] == catalog.tensors[key]
        assert (values(back, store, key) == stacked_tensor).all()


def test_a_layer_is_cut_from_arrays_with_more_or_fewer_axes() -> None:
    values_of_stack = numbered((2, 4, 6), 0)
    store = MemoryStore(
        {"deep": values_of_stack[:1].tobytes(), "flat": values_of_stack[1].tobytes()}
    )
    deep = StoredArray("deep", "int32", (1, 1, 4, 6), Extent("deep", 0))
    flat = StoredArray("flat", "int32", (4, 6), Extent("flat", 0))
    fragments = [
        Fragment(Box((0, 0, 0), (1, 4, 6)), deep, (0,) * 4),
        Fragment(Box((1, 0, 0), (1, 1, 6)), flat, (0, 0)),
        Fragment(Box((1, 1, 0), (1, 3, 6)), flat, (1, 0)),
    ]
    stack = Tensor("int32", values_of_stack.shape, lambda: fragments)
    catalog = Catalog("test", None, {"m.layers.w": stack})
    apart = unstack_layers(catalog, axis=1).catalog
    for n in range(4):
        assert (values(apart, store, f"m.layers.{n}.w") == values_of_stack[:, n]).all()
    back = stack_layers(apart, axis=1).catalog
    assert (values(back, store, "m.layers.w") == values_of_stack).all()


def test_tensors_with_too_few_axes_stay_apart_and_are_told() -> None:
    tensors = {f"m.layers.{n}.{name}": numbered((2,), n) for n in range(2) for name in "ab"}
    tensors |= {f"m.layers.{n}.w": numbered((2, 3, 4), n) for n in range(2)}
    result = stack_layers(catalog_of(tensors)[0], axis=2)
    assert result.catalog.tensors["m.layers.w"].shape == (2, 3, 2, 4)
    assert "m.layers.1.a" in result.catalog.tensors
    assert result.notes[0].endswith("too few axes to be stacked along axis 2")
    with pytest.raises(UsageError, match="has no axis 2"):
        unstack_layers(catalog_of({"m.layers.a": numbered((2, 3), 0)})[0], axis=2)


def test_zeros_by_rule_stay_zeros() -> None:
    zeros = Fragment(Box((0, 0), (2, 3)), None, ())
    stack = Tensor("int32", (2, 3), lambda: [zeros])
    apart = unstack_layers(Catalog("test", None, {"m.layers.w": stack})).catalog
    assert apart.fragments("m.layers.1.w") == [Fragment(Box((0,), (3,)), None, ())]


def test_what_some_layers_lack_or_have_otherwise_stays_apart_and_is_told() -> None:
    tensors = {
        **{f"model.layers.{n}.norm": numbered((2,), n) for n in range(3)},
        "model.layers.0.dense": numbered((2,), 10),
        **{f"model.layers.{n}.experts": numbered((2,), 20 + n) for n in (1, 2)},
        **{f"model.layers.{n}.odd": numbered((2 + n % 2,), 30 + n) for n in range(3)},
        "visual.blocks.0.w": numbered((2,), 40),
    }
    result = stack_layers(catalog_of(tensors)[0])
    assert set(result.catalog.tensors) == {
        "model.layers.norm",
        "model.layers.0.dense",
        "visual.blocks.w",
        *(f"model.layers.{n}.experts" for n in (1, 2)),
        *(f"model.layers.{n}.odd" for n in range(3)),
    }
    assert any(
        "model.layers.[0].dense and 1 more" in note and "3 layers" in note for note in result.notes
    )
    assert any("model.layers.[0-2].odd" in note and "shapes" in note for note in result.notes)


def test_nested_skeletons_and_facts_follow(per_layer: dict[str, np.ndarray]) -> None:
    keys = [
        key
        for key in per_layer
        if key.startswith("model.layers.") and key.endswith("up_proj.weight")
    ]
    nested = {str(n): {"mlp.up_proj.weight": TensorLeaf(key)} for n, key in enumerate(keys)}
    flat = {key.removeprefix("model."): TensorLeaf(key) for key in keys}
    for skeleton, wanted in (
        (
            {"model": {"layers": nested}, "note": "x"},
            {
                "model": {
                    "layers": {"mlp.up_proj.weight": TensorLeaf("model.layers.mlp.up_proj.weight")}
                },
                "note": "x",
            },
        ),
        (
            {"model": flat, "note": "x"},
            {
                "model": {
                    "layers.mlp.up_proj.weight": TensorLeaf("model.layers.mlp.up_proj.weight")
                },
                "note": "x",
            },
        ),
    ):
        catalog, _ = catalog_of(
            {key: per_layer[key] for key in keys},
            skeleton=skeleton,
            objects={"note": StoredObject("note", value="x")},
        )
        catalog = tied(catalog, {keys[1]: keys[0]})
        catalog = catalog.with_facet(MegatronModel(order=(*keys, "note")))
        catalog = catalog.with_facet(TorchDistFacts(mcore_data={keys[0]: {}}))
        stacked = stack_layers(catalog).catalog
        assert stacked.skeleton == wanted
        assert stacked.ties == {}
        assert facet_of(stacked, MegatronModel).order == ("model.layers.mlp.up_proj.weight", "note")
        assert facet_of(stacked, TorchDistFacts).mcore_data == {}
        back = unstack_layers(stacked).catalog
        assert back.skeleton == skeleton
        assert facet_of(back, MegatronModel).order == (*keys, "note")


@pytest.mark.parametrize(
    ("keys", "text"),
    [(["model.norm"], "no key"), (["model.layers.0.w", "model.layers.w"], "already")],
)
def test_stacks_that_cannot_be_are_usage_errors(keys: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        stack_layers(catalog_of({key: numbered((2,), 0) for key in keys})[0])


@pytest.mark.parametrize(
    ("shapes", "patterns", "text"),
    [
        ({"model.norm": (2,)}, (), "no key looks"),
        ({"m.layers.a": (2, 3), "m.layers.b": (3, 3)}, (), "2 layers, but this tensor has 3"),
        ({"m.layers.a": ()}, (), "scalar"),
        ({"m.layers.a": (2,), "m.layers.1.a": ()}, (), "already"),
        ({"m.layers.a": (2,)}, ("nothing*",), "no stacked tensor"),
        ({"m.norm": (2,)}, ("m.norm",), "no place for a layer number"),
    ],
)
def test_stacks_that_cannot_be_taken_apart_are_usage_errors(
    shapes: dict[str, tuple[int, ...]], patterns: tuple[str, ...], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        unstack_layers(
            catalog_of({key: numbered(shape, 0) for key, shape in shapes.items()})[0], patterns
        )


def test_a_tensor_with_too_many_layers_is_none() -> None:
    array = StoredArray("a", "int8", (MAX_LAYERS + 1,), Extent("a", 0))
    with pytest.raises(UsageError, match="more than the maximum"):
        unstack_layers(catalog_of_arrays(format="test", arrays={"m.layers.a": array}))


def test_globs_say_which_tensors_are_stacked() -> None:
    tensors = {
        "m.layers.a": numbered((2, 3), 0),
        "m.layers.b": numbered((5,), 0),
        "v.blocks.c": numbered((4, 1), 0),
    }
    result = unstack_layers(catalog_of(tensors)[0], ["m.layers.a", "v.*"])
    assert result.n_groups == 2
    assert list(result.catalog.tensors) == [
        "m.layers.0.a",
        "m.layers.1.a",
        "m.layers.b",
        *(f"v.blocks.{n}.c" for n in range(4)),
    ]


def test_parameter_groups_list_the_stacked_names_and_the_single_ones() -> None:
    names = ["layers.0.w", "layers.1.w", "norm"]
    key = "optimizer.param_groups.0.params"
    tensors = {f"model.{name}": numbered((2,), n) for n, name in enumerate(names)}
    tensors |= {
        f"optimizer.state.{name}.exp_avg": numbered((2,), 9 + n) for n, name in enumerate(names)
    }
    catalog, _ = catalog_of(tensors, objects={key: StoredObject(key, value=names)})
    result = stack_layers(catalog)
    assert result.catalog.objects[key].value == ["layers.w", "norm"]
    assert result.notes == ()
    assert unstack_layers(result.catalog).catalog.objects[key].value == names


def test_an_optimizer_that_counts_parameters_is_told_of() -> None:
    tensors = {f"model.layers.{n}.w": numbered((2,), n) for n in range(2)}
    tensors |= {f"optimizer.state.{n}.exp_avg": numbered((2,), 9 + n) for n in range(2)}
    result = stack_layers(catalog_of(tensors)[0])
    assert [note.partition(" was")[0] for note in result.notes] == ["the optimizer state"]
    assert len(unstack_layers(result.catalog).notes) == 1
