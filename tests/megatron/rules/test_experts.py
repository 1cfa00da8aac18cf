"""Layouts of experts that no golden checkpoint has: Transformer Engine's names, shared experts,
layers without any.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.facets import MegatronModel, RankFacts
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import MemoryStore
from core.megatron.model.args import fields_of, replaced
from core.megatron.model.topology import Topology, matched_dirs, rank_dir, rank_dirs
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.objects import state_dict
from core.pickle.inert import as_mapping
from tests.megatron.support.megatron_gold import RULES, filled
from tests.megatron.support.synthetic import Model
from tests.support.facets import facet_of, ranks_of, with_facts, without_facts
from tests.support.materialize import tensor_bytes

MIXED = Model(experts=8, moe=(1, 2, 3), shared=24)
GROUPED = replace(MIXED, expert_names="te_grouped", is_fused=True)
TOPOLOGIES = [
    Topology(),
    Topology(tp=2, ep=4),
    Topology(tp=4, ep=2, etp=1),
    Topology(tp=4, ep=8, etp=1),
    Topology(tp=2, pp=2, ep=2),
    Topology(tp=4, pp=4, etp=2),
    Topology(tp=3, ep=8, etp=1),
    Topology(pp=2, vpp=2, ep=2),
]


def check(model: Model, store: MemoryStore, source: Catalog, target: Topology) -> TargetCatalog:
    """Reshards and compares with the plain cutting, order included; returns the target catalog."""
    sharded = shard(source, target, rules=RULES)
    arrays = filled(sharded, source, store)  # type: ignore[arg-type]
    wanted: dict[str, np.ndarray] = {}
    ranks = ranks_of(sharded)
    for rank in target.ranks():
        folder = rank_dir(target, rank)
        root = as_mapping(ranks[target.coords(rank)][1]) or {}
        chunks = model.held(rank, target)
        assert [name for name in root if str(name).startswith("model")] == list(chunks)
        for chunk, entries in chunks.items():
            assert list(as_mapping(root[chunk]) or {}) == list(entries), folder
            wanted |= {f"{folder}:{chunk}.{name}": array for name, array in entries.items()}
    assert set(arrays) == set(wanted)
    for name, array in wanted.items():
        assert arrays[name].tobytes() == array.tobytes(), name
    return sharded


@pytest.mark.each_value
@pytest.mark.parametrize("model", [MIXED, GROUPED, replace(GROUPED, is_tied=True, is_gated=False)])
@pytest.mark.parametrize("a", [topology for topology in TOPOLOGIES if topology.vpp == 1], ids=str)
@pytest.mark.parametrize("b", TOPOLOGIES, ids=str)
def test_any_layout_of_experts_becomes_any_other(model: Model, a: Topology, b: Topology) -> None:
    store, catalog = model.catalog(a)
    source = unshard(catalog, rules=RULES)
    for name, array in model.tensors().items():
        assert tensor_bytes(source, store, name).tobytes() == array.tobytes(), name
    check(model, store, source, b)


@pytest.mark.parametrize("model", [MIXED, GROUPED])
def test_torch_dist_and_back_is_the_same(model: Model) -> None:
    store, catalog = model.catalog(Topology(tp=2, ep=4))
    once = unshard(catalog, rules=RULES)
    stacked = to_torch_dist(once, Topology(tp=4, pp=2, ep=4, etp=1), rules=RULES)
    filled(stacked.target, stacked.source, store)  # type: ignore[arg-type]
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    assert set(again.tensors) == set(once.tensors)
    assert facet_of(again, MegatronModel).expert_names == model.expert_names
    check(model, store, again, Topology(tp=4, ep=8, etp=1))


def test_layers_that_may_differ_keep_their_own_keys_with_an_axis_of_experts() -> None:
    _, catalog = GROUPED.catalog(Topology())
    target = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=2, ep=2), rules=RULES).target
    assert target.tensors["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (
        8,
        24,
        12,
    )
    assert target.tensors["decoder.layers.1.mlp.router.expert_bias"].shape == (8,)
    assert target.tensors["decoder.layers.1.pre_mlp_layernorm.weight"].shape == (12,)
    assert target.tensors["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"].shape == (12,)
    assert not any(key.startswith("decoder.layers.mlp") for key in target.tensors)
    alike = replace(MIXED, moe=(0, 1, 2, 3))
    _, catalog = alike.catalog(Topology())
    source = unshard(catalog, rules=RULES)
    assert (
        "decoder.layers.3.mlp.router.weight"
        in to_torch_dist(source, Topology(), rules=RULES).target.tensors
    )
    args = replaced(source.args, {"moe_layer_freq": 1})
    stacked = to_torch_dist(replace(source, args=args), Topology(etp=4), rules=RULES).target
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert stacked.tensors[key].shape == (4, 8, 12, 12)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in stacked.tensors
    boxes = [piece.box for piece in stacked.fragments(key)]
    assert len(boxes) == 4 * 8 * 4, (
        "torch_dist has no files to collide, so experts may be cut finer than the rest"
    )
    assert {box.shape for box in boxes} == {(1, 1, 12, 3)}


def test_experts_of_their_own_keys_in_torch_dist_are_understood() -> None:
    store, catalog = MIXED.catalog(Topology(tp=2))
    once = unshard(catalog, rules=RULES)
    nest = state_dict(once)
    old_of = {key.replace("local_experts.", "experts."): key for key in nest.tensors}
    renamed = replace(
        without_facts(nest),
        tensors={new: nest.tensors[old] for new, old in old_of.items()},
        skeleton=None,
        args=once.args,
        format="dcp",
    )
    check(MIXED, store, unshard(renamed, rules=RULES), Topology(ep=4))


def test_a_nested_state_dict_with_experts_is_understood() -> None:
    store, catalog = GROUPED.catalog(Topology(tp=4, ep=2, etp=1))
    nest = state_dict(unshard(catalog, rules=RULES))
    again = unshard(replace(without_facts(nest), format="dcp"), rules=RULES)
    check(GROUPED, store, again, Topology(tp=2, pp=2, ep=2))


def test_without_an_order_files_have_megatrons() -> None:
    for model in (MIXED, GROUPED):
        store, catalog = model.catalog(Topology(tp=2, ep=4))
        source = with_facts(
            unshard(catalog, rules=RULES), MegatronModel, order=None, expert_names=None
        )
        shuffled = dict(sorted(source.tensors.items(), key=lambda item: item[0][::-1]))
        check(model, store, replace(source, tensors=shuffled), Topology(ep=2))


def test_the_tenth_expert_stands_behind_the_ninth() -> None:
    for names in ("te_grouped", "sequential"):
        model = Model(layers=1, experts=12, moe=(0,), expert_names=names, expert_ffn=2)
        store, catalog = model.catalog(Topology(ep=4))
        source = unshard(catalog, rules=RULES)
        check(model, store, source, Topology())
        check(model, store, with_facts(source, MegatronModel, order=None), Topology())


def test_a_router_bias_keeps_its_precision_of_its_own() -> None:
    model = MIXED
    files = model.files(Topology(ep=2))
    for arrays in files.values():
        for name in arrays:
            if "expert_bias" not in name:
                arrays[name] = arrays[name].astype(np.float16)
    _, catalog = model.catalog(Topology(ep=2), files=files)
    target = shard(unshard(catalog, rules=RULES), Topology(tp=2, ep=4), rules=RULES)
    dtypes = {key.rpartition(".")[2]: tensor.dtype for key, tensor in target.tensors.items()}
    assert (dtypes["expert_bias"], dtypes["weight"]) == ("float32", "float16")


def with_states(topology: Topology, n_bytes: int) -> tuple[MemoryStore, Catalog]:
    """Grouped experts with a packed extra state of some bytes on every rank."""
    files = GROUPED.files(topology)
    for arrays in files.values():
        for layer in GROUPED.moe:
            name = f"decoder.layers.{layer}.mlp.experts.linear_fc1._extra_state"
            arrays[name] = np.arange(n_bytes, dtype=np.uint8)
    return GROUPED.catalog(topology, files=files)


def test_packed_extra_states_stay_only_with_their_experts() -> None:
    name = "decoder.layers.1.mlp.experts.linear_fc1._extra_state"
    store, catalog = with_states(Topology(ep=2), 5)
    source = unshard(catalog, rules=RULES)
    sharded = shard(source, Topology(tp=2, ep=2), rules=RULES)
    arrays = filled(sharded, source, store)  # type: ignore[arg-type]
    assert arrays[f"mp_rank_01_001:model.{name}"].tobytes() == bytes(range(5))
    for result in (
        shard(source, Topology(ep=4), rules=RULES),
        to_torch_dist(source, Topology(ep=2), rules=RULES).target,
    ):
        assert name not in result.tensors
        assert any(name in text and "packed" in text for text in map(str, result.dropped))
    _, catalog = with_states(Topology(ep=2), 0)
    empty = unshard(catalog, rules=RULES)
    assert name in shard(empty, Topology(ep=4), rules=RULES).tensors
    objects = to_torch_dist(empty, Topology(ep=2), rules=RULES).target.objects
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_7_8"
    assert objects[key] == StoredObject(key, value=[None], coords=(("file", 1),))


def test_older_checkpoints_without_all_dense_shards_are_refused() -> None:
    topology = Topology(tp=4, ep=2, etp=1)
    _, catalog = MIXED.catalog(topology)
    present = ("mp_rank_00_000", "mp_rank_01_001")
    written = {coords: entry for coords, entry in ranks_of(catalog).items() if entry[0] in present}
    with pytest.raises(
        MissingShardError, match="no file contains the shards of TP ranks 2, 3.*before 0.19"
    ):
        unshard(with_facts(catalog, RankFacts, ranks=written), rules=RULES)


def broken(name: str, array: np.ndarray | None, folder: str = "mp_rank_00_001") -> Catalog:
    files = MIXED.files(Topology(tp=2, ep=2))
    for rank, arrays in files.items():
        if rank == folder or folder == "all":
            arrays.pop(name, None)
            if array is not None:
                arrays[name] = array
    return MIXED.catalog(Topology(tp=2, ep=2), files=files)[1]


LOCAL = "decoder.layers.1.mlp.experts.local_experts."


@pytest.mark.parametrize(
    ("name", "array", "folder", "error", "message"),
    [
        (
            f"{LOCAL}1.linear_fc2.weight",
            None,
            "mp_rank_00_001",
            MissingShardError,
            "is in mp_rank_00_000, but not here",
        ),
        (
            f"{LOCAL}1.linear_fc2.weight",
            None,
            "all",
            MissingShardError,
            "other layers have it",
        ),
        (
            f"{LOCAL}4.linear_fc2.weight",
            np.ones((12, 6)),
            "all",
            CorruptError,
            "expert number 4 is out of range: each rank should have 4 experts",
        ),
        (
            f"{LOCAL}0.linear_fc1.weight",
            np.ones((9, 12)),
            "mp_rank_01_000",
            CorruptError,
            r"shape \(9, 12\)",
        ),
        (
            f"{LOCAL}0.linear_fc1.weight",
            np.ones((6, 12), np.float32),
            "all",
            CorruptError,
            "should have 24 rows",
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
            np.ones(2),
            "all",
            CorruptError,
            "experts 0, 4",
        ),
        (
            "decoder.layers.1.mlp.experts.linear_fc1.weight0",
            np.ones((12, 12)),
            "all",
            CorruptError,
            "two forms, sequential and",
        ),
        (
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
            np.ones((4, 12, 12)),
            "all",
            CorruptError,
            "two forms",
        ),
    ],
)
def test_experts_that_contradict_each_other_are_reported(
    name: str, array: np.ndarray | None, folder: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        unshard(broken(name, array, folder), rules=RULES)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"num_experts": 16},
            MissingShardError,
            "experts 4, 5, 6, 7, 12, 13, 14, 15 of 16 are not",
        ),
        ({"num_experts": 6}, CorruptError, "expert number 3 is out of range: each rank should"),
        ({"num_experts": 7}, CorruptError, r"7 experts \(num_experts\) are not divisible by EP 2"),
        ({"num_experts": None}, UnsupportedError, "EP 2, but not the number of experts"),
        ({"moe_layer_freq": [0, 0, 1, 1]}, MissingShardError, "other layers have it"),
        (
            {"moe_layer_freq": [0, 1, 1]},
            CorruptError,
            "moe_layer_freq is .0, 1, 1., not a list of 4 items",
        ),
        ({"moe_layer_freq": 0}, CorruptError, "moe_layer_freq is 0"),
    ],
)
def test_arguments_that_contradict_the_experts_are_refused(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    _, catalog = MIXED.catalog(Topology(tp=2, ep=2))
    wrong = replace(catalog, args=replaced(catalog.args, changes))
    with pytest.raises(error, match=message):
        unshard(wrong, rules=RULES)


def test_a_stack_of_other_experts_is_corrupt() -> None:
    _, catalog = MIXED.catalog(Topology())
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(), rules=RULES).source
    args = replaced(stacked.args, {"num_experts": 4})
    common = {**(stacked.common or {}), "args": args}
    with pytest.raises(
        CorruptError, match=r"is \(8, 24, 12\), but the model has 4 layers and 4 experts"
    ):
        unshard(replace(stacked, format="torch_dist", args=args, common=common), rules=RULES)


def test_the_arguments_follow_the_sizes() -> None:
    model = replace(
        MIXED, more_args={"world_size": 16, "data_parallel_size": 8, "sequence_parallel": True}
    )
    _, catalog = model.catalog(Topology(tp=2, ep=2))
    source = unshard(catalog, rules=RULES)

    def written(topology: Topology) -> dict[str, object]:
        fields = fields_of(shard(source, topology, rules=RULES).args)
        return {
            name: fields[name]
            for name in ("expert_model_parallel_size", "world_size", "data_parallel_size")
        }

    assert written(Topology(tp=4, ep=4, etp=1)) == {
        "expert_model_parallel_size": 4,
        "world_size": 16,
        "data_parallel_size": 4,
    }
    assert written(Topology(tp=3, ep=4, etp=1))["world_size"] == 48


@pytest.mark.parametrize(
    "topology", [*TOPOLOGIES, Topology(tp=6, ep=8, etp=2), Topology(tp=12, ep=8, etp=3)], ids=str
)
def test_the_files_are_those_that_the_written_arguments_announce(topology: Topology) -> None:
    model = replace(MIXED, more_args={"world_size": 2, "data_parallel_size": 2})
    _, catalog = model.catalog(Topology())
    sharded = shard(unshard(catalog, rules=RULES), topology, rules=RULES)
    ranks = ranks_of(sharded)
    world_size = fields_of(sharded.args)["world_size"]
    assert isinstance(world_size, int)
    folders = [folder for folder, _ in ranks.values()]
    coords_of = matched_dirs(folders, rank_dirs(topology, world_size=world_size), topology=topology)
    assert {folder: coords for coords, (folder, _) in ranks.items()} == coords_of
