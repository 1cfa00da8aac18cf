"""The optimizer in torch_dist, zarr and formats without a layout: read into the global form, and
written from it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.optimizer_keys import (
    STEP,
    Optimizer,
    ParamGroup,
    split_state_key,
    state_key,
)
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import replaced
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_torch_dist import Stacked, to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf, as_mapping
from core.verbs.convert.job import Job, Report, TopologyChange
from core.verbs.convert.run import run
from tests.megatron.support.megatron_gold import RULES, filled, fused, global_form, topology
from tests.support.facets import facet_of, with_facts, with_facts_of
from tests.support.materialize import Bytes, tensor_bytes

if TYPE_CHECKING:
    from core.engine.catalog.catalog import AnyCatalog, Catalog
    from core.files.store import LocalStore

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
    checkpoint = open_checkpoint(golden / name)
    return checkpoint.store, loaded(checkpoint.catalog, checkpoint.store)


def sizes_of(name: str) -> Topology:
    """The sizes that a case was saved with."""
    return topology(name.rpartition("/")[2])


@cache
def true_states(golden: Path) -> dict[str, Bytes]:
    """The true states of all parameters, by their keys in the global form, with fused names."""
    import torch

    states: dict[str, Bytes] = {}
    with safe_open(golden / "oracle/dense_gqa/global_optim.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            state, _, param = key.partition(".")
            tensor = file.get_tensor(key).contiguous()
            states[state_key(state, param)] = (
                tensor.view(torch.uint8).numpy().reshape(*tensor.shape, 4)
            )
    return states


def fused_key(key: str) -> str:
    """A key of the global form with the fused name of its parameter."""
    parts = split_state_key(key)
    return fused(key) if parts is None else state_key(parts[0], fused(parts[1]))


def optimizer_of(catalog: Catalog) -> Optimizer:
    assert catalog.optimizer is not None
    return catalog.optimizer


def check_values(catalog: Catalog, store: LocalStore, golden: Path) -> None:
    """Every state of every parameter is there, and what the oracle says."""
    states = [key for key in catalog.tensors if split_state_key(key) is not None]
    wanted = true_states(golden)
    assert {fused_key(key) for key in states} == set(wanted)
    for key in states:
        assert (tensor_bytes(catalog, store, key) == wanted[fused_key(key)]).all(), key


@pytest.mark.parametrize("name", SOURCES)
def test_every_state_of_every_parameter_is_read(golden: Path, name: str) -> None:
    store, catalog = source(golden, name)
    unsharded = unshard(catalog, rules=RULES)
    check_values(unsharded, store, golden)
    optimizer = optimizer_of(unsharded)
    assert optimizer.kind == ("distributed" if "distopt" in name else "float16")
    assert optimizer.states == ("exp_avg", "exp_avg_sq")
    assert [group.settings["wd_mult"] for group in optimizer.groups] == [1.0, 0.0]
    assert all(
        group.params is None and "params" not in group.settings for group in optimizer.groups
    )
    assert optimizer.step == (None if "distopt" in name else TensorLeaf(STEP))
    if optimizer.step is not None:
        assert tensor_bytes(unsharded, store, STEP).tobytes() == b"\0\0\x80?"
    assert not any("optim" in str(entry) for entry in unsharded.dropped if entry.is_listed)


@pytest.mark.parametrize("name", [name for name in (*PLAIN, RESHARDABLE) if "zarr" not in name])
def test_written_at_its_own_sizes_it_is_what_megatron_wrote(golden: Path, name: str) -> None:
    store, catalog = source(golden, name)
    stacked = to_torch_dist(unshard(catalog, rules=RULES), sizes_of(name), rules=RULES)
    check_like(stacked.target, catalog)
    arrays = filled(stacked.target, stacked.source, store)
    for key in stacked.target.tensors:
        values = tensor_bytes(catalog, store, key)
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(
                slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True)
            )
            assert (arrays[fragment.array.name] == values[region]).all(), fragment.array.name


def check_like(target: AnyCatalog, wanted: Catalog, *, has_settings: bool = True) -> None:
    """A target has the keys, dtypes, shapes and chunks of a checkpoint of Megatron's, and its
    optimizer settings.
    """
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in target.tensors.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in wanted.tensors.items()
    }
    for key in target.tensors:
        boxes = {fragment.box for fragment in wanted.fragments(key)}
        assert {fragment.box for fragment in target.fragments(key)} == boxes, key
    common, theirs = target.common, wanted.common
    assert common is not None and theirs is not None
    ours = as_mapping(common["optimizer"])
    assert ours is not None
    if has_settings:
        assert are_same(without_leaves(ours), without_leaves(theirs["optimizer"]))
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
    stacked = to_torch_dist(unshard(catalog, rules=RULES), sizes_of(name), rules=RULES)
    wanted_store, wanted = source(golden, RESHARDABLE)
    assert {
        key: (tensor.dtype, tensor.shape) for key, tensor in stacked.target.tensors.items()
    } == {key: (tensor.dtype, tensor.shape) for key, tensor in wanted.tensors.items()}
    arrays = filled(stacked.target, stacked.source, store)
    for key in stacked.target.tensors:
        values = tensor_bytes(wanted, wanted_store, key)
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(
                slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True)
            )
            assert (arrays[fragment.array.name] == values[region]).all(), fragment.array.name
    facts = stacked.target.facet(TorchDistFacts) or TorchDistFacts()
    assert facts.dialect == ("common_pt" if "torch_dist" in name else None)
    assert not any((facts.mcore_data or {}).values())
    common = stacked.target.common
    assert common is not None
    assert common["content_metadata"] == (wanted.common or {})["content_metadata"]
    entry = as_mapping(common["optimizer"])
    assert entry is not None and entry["param_state_sharding_type"] == "fully_reshardable"
    assert any("fully_reshardable" in note for note in stacked.target.notes)


@pytest.mark.parametrize("sizes", [Topology(tp=4), Topology(tp=1, pp=4), Topology(tp=2, pp=2)])
def test_states_are_cut_as_their_parameters_are(golden: Path, sizes: Topology) -> None:
    store, catalog = source(golden, RESHARDABLE)
    stacked = to_torch_dist(unshard(catalog, rules=RULES), sizes, rules=RULES)
    filled(stacked.target, stacked.source, store)
    params = [
        key
        for key in stacked.target.tensors
        if split_state_key(key) is None and "expert_bias" not in key
    ]
    assert params
    for param in params:
        boxes = {fragment.box for fragment in stacked.target.fragments(param)}
        for state in ("param", "exp_avg", "exp_avg_sq"):
            key = state_key(state, param)
            assert {fragment.box for fragment in stacked.target.fragments(key)} == boxes, key


@pytest.mark.parametrize(
    ("name", "keys", "sharding"),
    [(PLAIN[0], "fp32_param", None), (RESHARDABLE, "fp32_param", "fully_sharded_model_space")],
)
def test_zarr_gets_the_form_that_its_readers_know(
    golden: Path, name: str, keys: str, sharding: str | None
) -> None:
    _, catalog = source(golden, name)
    stacked = to_torch_dist(
        unshard(catalog, rules=RULES), sizes_of(name), rules=RULES, format="zarr"
    )
    _, wanted = source(golden, MODEL_SPACE[1])
    assert set(stacked.target.tensors) == set(wanted.tensors)
    entry = as_mapping((stacked.target.common or {})["optimizer"])
    assert entry is not None and entry.get("param_state_sharding_type") == sharding


def test_a_true_shape_that_is_none_is_corrupt(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[0])
    facts = facet_of(catalog, TorchDistFacts).mcore_data
    assert facts is not None
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    for wrong in ((4, 64, 95), (4, 64), (4, 32, 96), "shape", (4, 64, True)):
        changed = {**facts, key: {"nd_reformulated_orig_global_shape": wrong}}
        with pytest.raises(CorruptError, match="is inconsistent with the original shape"):
            unshard(with_facts(catalog, TorchDistFacts, mcore_data=changed), rules=RULES)


def test_reformulated_states_without_their_true_shapes_are_refused(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[0])
    with pytest.raises(CorruptError, match=r"the state's shape|shape of the stacked"):
        unshard(with_facts(catalog, TorchDistFacts, mcore_data={}), rules=RULES)


def test_transposed_states_of_grouped_experts_are_refused(golden: Path) -> None:
    _, catalog = source(golden, MODEL_SPACE[1])
    changes = {"num_experts": 4, "moe_grouped_gemm": True, "moe_layer_freq": [0, 0, 0, 0]}
    common = catalog.common
    assert common is not None
    args = replaced(common["args"], changes)
    with pytest.raises(UnsupportedError, match="GroupedMLP"):
        unshard(replace(catalog, common={**common, "args": args}), rules=RULES)


def test_a_state_of_no_parameter_is_corrupt(golden: Path) -> None:
    _, catalog = source(golden, RESHARDABLE)
    extra = "optimizer.state.exp_avg.decoder.layers.self_attention.q_layernorm.weight"
    like = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    tensors = {**catalog.tensors, extra: catalog.tensors[like]}
    with pytest.raises(CorruptError, match="for a parameter that the model does not have"):
        unshard(replace(catalog, tensors=tensors), rules=RULES)


BUCKETS = (
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dp_zero_gather_scatter",
)


def converted(src: Path, dst: Path, to: str, **options: Any) -> tuple[Report, LocalStore, Catalog]:
    """A conversion by the engine: its report, and the result's store and catalog, objects
    loaded.
    """
    report = run(Job(src=src, dst=dst, to=to, fsync=False, **options))
    checkpoint = open_checkpoint(dst)
    return report, checkpoint.store, loaded(checkpoint.catalog, checkpoint.store)


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_become_fully_reshardable(golden: Path, tmp_path: Path, name: str) -> None:
    sizes = TopologyChange(tp=2, pp=1)
    report, store, catalog = converted(
        golden / name, tmp_path / "out", "torch_dist", topology=sizes
    )
    check_like(catalog, source(golden, RESHARDABLE)[1], has_settings="mcore_torch_dist" in name)
    check_values(unshard(catalog, rules=RULES), store, golden)
    assert any("fully_reshardable" in note for note in report.notes)
    assert not any("optim" in text for text in report.dropped)
    assert not any("optimizer.distributed" in key for key in (*catalog.tensors, *catalog.objects))


@pytest.mark.parametrize("name", (*BUCKETS, MODEL_SPACE[0]))
def test_without_a_new_layout_the_form_stays_with_a_note(
    golden: Path, tmp_path: Path, name: str
) -> None:
    report, _, catalog = converted(golden / name, tmp_path / "out", "torch_dist")
    assert set(catalog.tensors) == set(source(golden, name)[1].tensors)
    assert any("--tp-new" in note and "fully_reshardable" in note for note in report.notes)


@pytest.mark.parametrize(
    "name",
    [
        PLAIN[0],
        BUCKETS[0],
        MODEL_SPACE[0],
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (PLAIN[1], RESHARDABLE, BUCKETS[1])
        ),
    ],
)
def test_zarr_and_back(golden: Path, tmp_path: Path, name: str) -> None:
    _, store, catalog = converted(golden / name, tmp_path / "zarr", "zarr")
    assert set(catalog.tensors) == set(
        source(golden, MODEL_SPACE[1] if "distopt" in name else PLAIN[3])[1].tensors
    )
    check_values(unshard(catalog, rules=RULES), store, golden)
    _, store, catalog = converted(tmp_path / "zarr", tmp_path / "back", "torch_dist")
    has_settings = name.startswith("mcore_torch_dist") or "0161" in name
    check_like(
        catalog,
        source(golden, RESHARDABLE if "distopt" in name else name)[1],
        has_settings=has_settings,
    )
    check_values(unshard(catalog, rules=RULES), store, golden)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "to",
    [
        "dcp",
        "zarr3",
        *(pytest.param(to, marks=pytest.mark.long) for to in ("torch", "safetensors")),
    ],
)
@pytest.mark.parametrize("name", [PLAIN[0], MODEL_SPACE[0]])
def test_formats_without_a_layout_and_back(
    golden: Path, tmp_path: Path, name: str, to: str
) -> None:
    report, _, catalog = converted(golden / name, tmp_path / "out", to, names="megatron")
    assert "optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight" in catalog.tensors
    assert not any("optim" in text for text in report.dropped)
    sizes = TopologyChange(tp=sizes_of(name).tp, pp=sizes_of(name).pp)
    _, store, catalog = converted(tmp_path / "out", tmp_path / "back", "torch_dist", topology=sizes)
    wanted = source(golden, RESHARDABLE if "distopt" in name else name)[1]
    check_like(catalog, wanted, has_settings=name in PLAIN)
    check_values(unshard(catalog, rules=RULES), store, golden)


def test_one_file_of_tensors_alone_says_what_it_leaves_out(golden: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.safetensors"
    report, _, catalog = converted(golden / PLAIN[0], dst, "safetensors", names="megatron")
    assert "optimizer.state.exp_avg.output_layer.weight" in catalog.tensors
    assert any(text.startswith("optimizer:") for text in report.dropped)
    with pytest.raises(UnsupportedError):
        run(
            Job(
                src=dst,
                dst=tmp_path / "back",
                to="torch_dist",
                topology=TopologyChange(tp=1),
                fsync=False,
            )
        )


RANKS = {
    "tp1_pp1_optim": PLAIN[0],
    "tp4_pp1_optim": PLAIN[0],
    "tp1_pp1_dp2_distopt": RESHARDABLE,
    "tp2_pp1_dp2_distopt": RESHARDABLE,
}


@pytest.mark.first(3)
@pytest.mark.parametrize("case", RANKS)
def test_rank_files_become_what_megatron_saves_as_torch_dist(
    golden: Path, tmp_path: Path, case: str
) -> None:
    wanted_store, wanted = source(golden, RANKS[case])
    sizes = sizes_of(RANKS[case])
    src = golden / "mcore_legacy/dense_gqa" / case
    change = TopologyChange(tp=sizes.tp, pp=sizes.pp)
    report, store, catalog = converted(src, tmp_path / "out", "torch_dist", topology=change)
    check_like(catalog, wanted)
    for key in catalog.tensors:
        assert (
            tensor_bytes(catalog, store, key) == tensor_bytes(wanted, wanted_store, key)
        ).all(), key
    assert not any("optim" in text for text in report.dropped)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "to",
    [
        "torch",
        "safetensors",
        *(pytest.param(to, marks=pytest.mark.long) for to in ("dcp", "zarr3")),
    ],
)
@pytest.mark.parametrize("case", ["tp2_pp1_optim", "tp2_pp1_dp2_distopt"])
def test_rank_files_by_way_of_a_format_without_a_layout(
    golden: Path, tmp_path: Path, case: str, to: str
) -> None:
    src = golden / "mcore_legacy/dense_gqa" / case
    _, _, catalog = converted(src, tmp_path / "out", to)
    assert "optimizer.state.fp32_param.output_layer.weight" in catalog.tensors
    sizes = TopologyChange(tp=2, pp=2)
    _, store, back = converted(tmp_path / "out", tmp_path / "back", "torch_dist", topology=sizes)
    direct_store, direct = source_of(
        converted(src, tmp_path / "direct", "torch_dist", topology=sizes)
    )
    check_like(back, direct)
    check_values(unshard(back, rules=RULES), store, golden)
    check_values(unshard(direct, rules=RULES), direct_store, golden)


def source_of(result: tuple[Report, LocalStore, Catalog]) -> tuple[LocalStore, Catalog]:
    return result[1], result[2]


@pytest.mark.parametrize("case", ["tp2_pp1_optim", "tp1_pp1_dp2_distopt"])
def test_groups_keep_the_names_of_their_parameters(golden: Path, tmp_path: Path, case: str) -> None:
    src = golden / "mcore_legacy/dense_gqa" / case
    origin = open_checkpoint(src)
    wanted = optimizer_of(unshard(origin.catalog, rules=RULES, store=origin.store))
    assert all((group.params is None) == ("distopt" in case) for group in wanted.groups)
    for to in ("dcp", "safetensors"):
        _, _, catalog = converted(src, tmp_path / to, to)
        optimizer = optimizer_of(unshard(catalog, rules=RULES))
        assert [group.params for group in optimizer.groups] == [
            group.params for group in wanted.groups
        ]
        assert [group.settings for group in optimizer.groups] == [
            group.settings for group in wanted.groups
        ]
        assert (optimizer.kind, optimizer.states, optimizer.step) == (
            wanted.kind,
            wanted.states,
            wanted.step,
        )


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_ranks_with_random_states_of_their_own_become_trees(
    golden: Path, tmp_path: Path, to: str
) -> None:
    _, _, catalog = converted(golden / "mcore_legacy/moe_seq/tp2_pp1_ep2", tmp_path / "out", to)
    assert any("local_experts.3.linear_fc2.weight" in key for key in catalog.tensors)


@pytest.mark.each_value
@pytest.mark.parametrize("case", ["tp2_pp1_optim", "tp2_pp1_dp2_distopt"])
@pytest.mark.parametrize("to", ["dcp", "zarr"])
def test_commutes_with_resharding_of_rank_files(
    golden: Path, tmp_path: Path, case: str, to: str
) -> None:
    """Rank files, by way of global tensors, at another layout are those of the direct way."""
    src = golden / "mcore_legacy/dense_gqa" / case
    sizes = TopologyChange(tp=1, pp=2)
    _, direct_store, direct = converted(src, tmp_path / "a", "megatron", topology=sizes)
    converted(src, tmp_path / "b", to)
    _, store, resharded = converted(tmp_path / "b", tmp_path / "c", "megatron", topology=sizes)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in resharded.tensors.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in direct.tensors.items()
    }
    for key in direct.tensors:
        assert (
            tensor_bytes(resharded, store, key) == tensor_bytes(direct, direct_store, key)
        ).all(), key


def with_optimizer(catalog: Catalog, *, is_split: bool) -> Catalog:
    """The global form of a model with an optimizer whose moments are the weights themselves.

    Args:
        is_split: experts have groups of their own.
    """
    params = [key for key in catalog.tensors if RULES.is_param(key)]
    param_of_state = {
        state_key(state, key): key for state in ("fp32_param", "exp_avg") for key in params
    }
    kinds = [(1.0, False), (1.0, True), (0.0, False)] if is_split else [(1.0, False), (0.0, False)]
    settings = [
        {
            "wd_mult": decay,
            "lr_mult": 1.0,
            "is_expert_parallel": is_expert,
            "is_decoupled_lr": False,
            "step": 5,
        }
        for decay, is_expert in kinds
    ]
    return replace(
        catalog,
        tensors={
            **catalog.tensors,
            **{key: catalog.tensors[param] for key, param in param_of_state.items()},
        },
        optimizer=Optimizer("distributed", tuple(map(ParamGroup, settings)), ("exp_avg",)),
    )


@pytest.mark.parametrize(
    ("origin", "sizes"), [("tp1_pp1", Topology(ep=2)), ("tp1_pp1_ep2", Topology())]
)
def test_experts_get_groups_of_their_own_with_expert_parallelism(
    golden: Path, origin: str, sizes: Topology
) -> None:
    store, model = global_form(golden, "moe_seq", origin)
    stacked = to_torch_dist(with_optimizer(model, is_split="ep2" in origin), sizes, rules=RULES)
    filled(stacked.target, stacked.source, store)
    experts = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert stacked.target.tensors[f"optimizer.state.param.{experts}"].shape == (4, 4, 32, 32)
    assert {f.box for f in stacked.target.fragments(f"optimizer.state.exp_avg.{experts}")} == {
        f.box for f in stacked.target.fragments(experts)
    }
    entry = as_mapping((stacked.target.common or {})["optimizer"])
    assert entry is not None
    members = [entry[number] for number in (0, 1)] if sizes.ep > 1 else [entry]
    assert set(entry) == ({0, 1} if sizes.ep > 1 else {"optimizer", "param_state_sharding_type"})
    groups = [
        [group["is_expert_parallel"] for group in member["optimizer"]["param_groups"]]
        for member in members
    ]  # type: ignore[index]
    assert groups == ([[False, False], [True]] if sizes.ep > 1 else [[False, False]])
    again = unshard(as_stored(stacked), rules=RULES)
    assert [group.is_expert for group in optimizer_of(again).groups] == [
        flag for member in groups for flag in member
    ]
    assert {key for key in again.tensors if split_state_key(key)} == stacked_states(model)


def as_stored(stacked: Stacked) -> Catalog:
    """A target catalog read again, without its bytes."""
    return replace(
        with_facts_of(stacked.source, stacked.target), format="torch_dist", skeleton=None
    )


def stacked_states(model: Catalog) -> set[str]:
    params = [key for key in model.tensors if RULES.is_param(key)]
    return {state_key(state, key) for state in ("fp32_param", "exp_avg") for key in params}


@pytest.mark.parametrize("prefix", ["chained_0.", "chained_1."])
def test_prefixes_of_chained_optimizers_are_taken_off(golden: Path, prefix: str) -> None:
    store, catalog = source(golden, RESHARDABLE)
    old_of = {prefix + key if key.startswith("optimizer.") else key: key for key in catalog.tensors}
    renamed = replace(
        catalog,
        tensors={new: catalog.tensors[old] for new, old in old_of.items()},
    )
    check_values(unshard(renamed, rules=RULES), store, golden)


def test_layers_without_states_are_refused_where_layers_are_stacked(golden: Path) -> None:
    _, model = global_form(golden, "dense_gqa", "tp1_pp1")
    trained = with_optimizer(model, is_split=False)
    tensors = {
        key: meta
        for key, meta in trained.tensors.items()
        if ".exp_avg.decoder.layers.2." not in key
    }
    with pytest.raises(UnsupportedError, match="3 of the 4 tensors to stack"):
        to_torch_dist(replace(trained, tensors=tensors), Topology(), rules=RULES)


def test_what_else_an_optimizer_holds_is_kept(golden: Path) -> None:
    _, catalog = source(golden, PLAIN[1])
    common = catalog.common
    assert common is not None
    entry = as_mapping(common["optimizer"])
    assert entry is not None
    leaf = entry["optimizer"]["state"]["common_step"]  # type: ignore[index]
    scaler = {"scale": leaf, "growth_tracker": 7}
    changed = replace(catalog, common={**common, "optimizer": {**entry, "grad_scaler": scaler}})
    stacked = to_torch_dist(unshard(changed, rules=RULES), Topology(tp=2, pp=2), rules=RULES)
    assert isinstance(leaf, TensorLeaf) and leaf.key in stacked.target.hidden
    entries = as_mapping((stacked.target.common or {})["optimizer"])
    assert entries is not None and entries["grad_scaler"] == scaler
    again = optimizer_of(unshard(as_stored(stacked), rules=RULES))
    assert again.entries == {"grad_scaler": scaler}


def test_an_optimizer_of_another_form_is_refused_by_name(golden: Path) -> None:
    _, catalog = source(golden, RESHARDABLE)
    new_of = {
        key: f"optimizer.state.{parts[1]}.{parts[0]}"
        for key in catalog.tensors
        if (parts := split_state_key(key))
    }
    old_of = {new_of.get(key, key): key for key in catalog.tensors}
    renamed = replace(
        catalog,
        tensors={new: catalog.tensors[old] for new, old in old_of.items()},
    )
    with pytest.raises(UnsupportedError, match=r"in the form torch_by_name .*--no-optim"):
        unshard(renamed, rules=RULES)


def test_muon_chained_with_buckets_is_refused_by_name(golden: Path) -> None:
    # Megatron-LM 0.20 saves Muon's matrices by name, and the rest in buckets of chained_1.
    store, catalog = source(golden, BUCKETS[0])
    key = "decoder.layers.mlp.linear_fc2.weight"
    momentum = f"chained_0.optimizer.state.momentum_buffer.{key}"
    catalog = replace(catalog, tensors={**catalog.tensors, momentum: catalog.tensors[key]})
    with pytest.raises(UnsupportedError, match="chains Muon") as caught:
        unshard(catalog, rules=RULES, store=store)
    assert "--no-use-layer-wise-param-layout" in (caught.value.hint or "")


@pytest.mark.parametrize("name", [BUCKETS[0], RESHARDABLE, MODEL_SPACE[1], PLAIN[0]])
def test_global_tensors_become_rank_files(golden: Path, tmp_path: Path, name: str) -> None:
    report, store, catalog = converted(
        golden / name, tmp_path / "out", "megatron", topology=TopologyChange(tp=1, pp=2)
    )
    check_values(unshard(catalog, rules=RULES, store=store), store, golden)
    assert not any("optim" in text for text in report.dropped)


def test_masters_of_other_weights_are_noted(golden: Path, tmp_path: Path) -> None:
    src = golden / "mcore_torch_dist" / "dense_gqa" / "tp2_pp2_optim"
    sizes = TopologyChange(tp=1)
    report = run(Job(src=src, dst=tmp_path / "a", topology=sizes, is_reshard=True, fsync=False))
    assert not any("round to the weights" in note for note in report.notes)
    copy = tmp_path / "copy"
    shutil.copytree(src, copy)
    checkpoint = open_checkpoint(copy)
    piece = checkpoint.catalog.fragments("decoder.final_layernorm.weight")[0]
    assert piece.array is not None
    place = piece.array.locate(checkpoint.store).extent
    checkpoint.store.close()
    assert place is not None
    with (copy / "iter_0000010" / place.file).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\x12\x34")
    report = run(
        Job(src=copy, dst=tmp_path / "b", topology=sizes, is_reshard=True, fsync=False, crc=False)
    )
    assert any(
        "master weights of decoder.final_layernorm.weight do not round" in note
        for note in report.notes
    )
