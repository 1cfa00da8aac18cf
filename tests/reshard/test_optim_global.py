"""The optimizer in torch_dist, zarr and formats without a layout: read into the global form, and written from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

from core.errors import CorruptError, UnsupportedError
from core.formats.torch_file import load_object
from core.inert import TensorLeaf, as_mapping
from core.layout import stack, unshard
from core.layout_args import replaced
from core.layout_state import same
from core.objects import loaded
from core.open import open_checkpoint
from core.optimizer import STEP, Optimizer, state_key, state_of
from core.topology import Topology
from tests.materialize import Bytes, tensor_bytes
from tests.reshard.megatron_gold import RULES, filled, fused, topology

if TYPE_CHECKING:
    from core.catalog import Catalog
    from core.store import LocalStore

PLAIN = (
    "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
)
RESHARDABLE = "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable"
MODEL_SPACE = (
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
    "mcore0121_zarr/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
)
SOURCES = (*PLAIN, RESHARDABLE, *MODEL_SPACE)


@cache
def source(golden: Path, name: str) -> tuple[LocalStore, Catalog]:
    """Store and catalog of a case, its objects loaded."""
    found = open_checkpoint(golden / name)
    return found.store, loaded(found.catalog, found.store, load_object)


def sizes_of(name: str) -> Topology:
    """The sizes that a case was saved with."""
    return topology(name.rpartition("/")[2])


@cache
def true_states(golden: Path) -> dict[str, Bytes]:
    """The true states of all parameters, by their keys in the global form, with fused names."""
    import torch

    found: dict[str, Bytes] = {}
    with safe_open(golden / "oracle/dense_gqa/global_optim.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            state, _, param = key.partition(".")
            tensor = file.get_tensor(key).contiguous()
            found[state_key(state, param)] = tensor.view(torch.uint8).numpy().reshape(*tensor.shape, 4)
    return found


def fused_key(key: str) -> str:
    """A key of the global form with the fused name of its parameter."""
    found = state_of(key)
    return fused(key) if found is None else state_key(found[0], fused(found[1]))


def optimizer_of(catalog: Catalog) -> Optimizer:
    found = catalog.attrs["optimizer"]
    assert isinstance(found, Optimizer)
    return found


def check_values(catalog: Catalog, store: LocalStore, golden: Path) -> None:
    """Every state of every parameter is there, and what the oracle says."""
    states = [key for key in catalog.tensors if state_of(key) is not None]
    wanted = true_states(golden)
    assert {fused_key(key) for key in states} == set(wanted)
    for key in states:
        assert (tensor_bytes(catalog, store, key) == wanted[fused_key(key)]).all(), key


@pytest.mark.parametrize("name", SOURCES)
def test_every_state_of_every_parameter_is_read(golden: Path, name: str) -> None:
    store, catalog = source(golden, name)
    found = unshard(catalog, rules=RULES)
    check_values(found, store, golden)
    optimizer = optimizer_of(found)
    assert optimizer.kind == ("distributed" if "distopt" in name else "float16")
    assert optimizer.states == ("exp_avg", "exp_avg_sq")
    assert [group.settings["wd_mult"] for group in optimizer.groups] == [1.0, 0.0]
    assert all(group.params is None and "params" not in group.settings for group in optimizer.groups)
    assert optimizer.step == (None if "distopt" in name else TensorLeaf(STEP))
    if optimizer.step is not None:
        assert tensor_bytes(found, store, STEP).tobytes() == b"\0\0\x80?"
    assert not any("optim" in text for text in found.attrs["dropped"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in (*PLAIN, RESHARDABLE) if "zarr" not in name])
def test_written_at_its_own_sizes_it_is_what_megatron_wrote(golden: Path, name: str) -> None:
    store, catalog = source(golden, name)
    stacked = stack(unshard(catalog, rules=RULES), sizes_of(name), rules=RULES)
    check_like(stacked.target, catalog)
    arrays = filled(stacked.target, stacked.source, store)
    for key in stacked.target.tensors:
        whole = tensor_bytes(catalog, store, key)
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True))
            assert (arrays[fragment.array.name] == whole[region]).all(), fragment.array.name


def check_like(target: Catalog, wanted: Catalog) -> None:
    """A target has the keys, dtypes, shapes, chunks and optimizer settings of a checkpoint of Megatron's."""
    assert {key: (meta.dtype, meta.shape) for key, meta in target.tensors.items()} == {
        key: (meta.dtype, meta.shape) for key, meta in wanted.tensors.items()
    }
    for key in target.tensors:
        boxes = {fragment.box for fragment in wanted.fragments(key)}
        assert {fragment.box for fragment in target.fragments(key)} == boxes, key
    common, theirs = as_mapping(target.attrs["common"]), as_mapping(wanted.attrs["common"])
    assert common is not None and theirs is not None
    mine = as_mapping(common["optimizer"])
    assert mine is not None
    assert same(without_leaves(mine), without_leaves(theirs["optimizer"]))
    if "content_metadata" in theirs:
        assert common["content_metadata"] == theirs["content_metadata"]


def without_leaves(value: object) -> object:
    """A tree with one text for every tensor, to be compared."""
    if isinstance(value, dict):
        return {name: without_leaves(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_leaves(item) for item in value]
    return "tensor" if isinstance(value, TensorLeaf) else value


@pytest.mark.parametrize("name", MODEL_SPACE)
def test_model_space_becomes_fully_reshardable(golden: Path, name: str) -> None:
    store, catalog = source(golden, name)
    stacked = stack(unshard(catalog, rules=RULES), sizes_of(name), rules=RULES)
    wanted_store, wanted = source(golden, RESHARDABLE)
    assert {key: (meta.dtype, meta.shape) for key, meta in stacked.target.tensors.items()} == {
        key: (meta.dtype, meta.shape) for key, meta in wanted.tensors.items()
    }
    arrays = filled(stacked.target, stacked.source, store)
    for key in stacked.target.tensors:
        whole = tensor_bytes(wanted, wanted_store, key)
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True))
            assert (arrays[fragment.array.name] == whole[region]).all(), fragment.array.name
    assert stacked.target.attrs.get("dialect") == ("common_pt" if "torch_dist" in name else None)
    facts = stacked.target.attrs.get("mcore_data", {})
    assert isinstance(facts, dict) and not any(facts.values())
    common = as_mapping(stacked.target.attrs["common"])
    assert common is not None
    assert common["content_metadata"] == (as_mapping(wanted.attrs["common"]) or {})["content_metadata"]
    entry = as_mapping(common["optimizer"])
    assert entry is not None and entry["param_state_sharding_type"] == "fully_reshardable"
    assert any("fully_reshardable" in str(note) for note in stacked.target.attrs["notes"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [Topology(tp=4), Topology(tp=1, pp=4), Topology(tp=2, pp=2)])
def test_states_are_cut_as_their_parameters_are(golden: Path, sizes: Topology) -> None:
    store, catalog = source(golden, RESHARDABLE)
    stacked = stack(unshard(catalog, rules=RULES), sizes, rules=RULES)
    filled(stacked.target, stacked.source, store)
    params = [key for key in stacked.target.tensors if state_of(key) is None and "expert_bias" not in key]
    for param in params:
        boxes = {fragment.box for fragment in stacked.target.fragments(param)}
        for state in ("param", "exp_avg", "exp_avg_sq"):
            key = state_key(state, param)
            assert {fragment.box for fragment in stacked.target.fragments(key)} == boxes, key


@pytest.mark.parametrize(
    ("name", "keys", "sharding"),
    [(PLAIN[0], "fp32_param", None), (RESHARDABLE, "fp32_param", "fully_sharded_model_space")],
)
def test_zarr_gets_the_form_that_its_readers_know(golden: Path, name: str, keys: str, sharding: str | None) -> None:
    _, catalog = source(golden, name)
    stacked = stack(unshard(catalog, rules=RULES), sizes_of(name), rules=RULES, format="zarr")
    _, wanted = source(golden, MODEL_SPACE[1])
    assert set(stacked.target.tensors) == set(wanted.tensors)
    entry = as_mapping((as_mapping(stacked.target.attrs["common"]) or {})["optimizer"])
    assert entry is not None and entry.get("param_state_sharding_type") == sharding


def test_a_true_shape_that_is_none_is_corrupt(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[0])
    facts = catalog.attrs["mcore_data"]
    assert isinstance(facts, dict)
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    for wrong in ((4, 64, 95), (4, 64), (4, 32, 96), "shape", (4, 64, True)):
        changed = {**facts, key: {"nd_reformulated_orig_global_shape": wrong}}
        with pytest.raises(CorruptError, match="is said to have been one of shape"):
            unshard(catalog.with_attrs(mcore_data=changed), rules=RULES)


def test_reformulated_states_without_their_true_shapes_are_refused(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[0])
    with pytest.raises(CorruptError, match=r"(a state|a stack) of shape"):
        unshard(catalog.with_attrs(mcore_data={}), rules=RULES)


def test_transposed_states_of_grouped_experts_are_refused(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[1])
    changes = {"num_experts": 4, "moe_grouped_gemm": True, "moe_layer_freq": [0, 0, 0, 0]}
    common = as_mapping(catalog.attrs["common"])
    assert common is not None
    args = replaced(common["args"], changes)
    with pytest.raises(UnsupportedError, match="GroupedMLP"):
        unshard(catalog.with_attrs(common={**common, "args": args}), rules=RULES)


def test_a_state_of_no_parameter_is_corrupt(golden: Path) -> None:
    from dataclasses import replace

    _, catalog = source(golden, RESHARDABLE)
    extra = "optimizer.state.exp_avg.decoder.layers.self_attention.q_layernorm.weight"
    like = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    tensors = {**catalog.tensors, extra: replace(catalog.tensors[like], key=extra)}
    with pytest.raises(CorruptError, match="of a parameter that the model has not"):
        unshard(replace(catalog, tensors=tensors), rules=RULES)
