"""Multi-latent attention: which projections are cut, and what must be true of their sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.engine.catalog.facets import MegatronModel
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import fields_of, replaced
from core.megatron.model.topology import Topology, rank_dir
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import as_mapping
from tests.megatron.support.megatron_gold import RULES, filled
from tests.megatron.support.synthetic import Latent, Model
from tests.support.facets import facet_of, ranks_of
from tests.support.materialize import tensor_bytes

FUSED = Model(latent=Latent(), is_fused=True)
MODELS = {
    "fused": FUSED,
    "norms apart": Model(latent=Latent()),
    "queries not compressed": Model(latent=Latent(q=None), is_fused=True),
    "down projections cut": Model(latent=Latent(is_cut=True)),
    "joined": replace(FUSED, latent=Latent(is_joined=True)),
    "joined, cut": replace(FUSED, latent=Latent(is_joined=True, is_cut=True)),
    "with experts": replace(FUSED, experts=4, moe=(1, 2, 3), shared=12, expert_names="te_grouped"),
}
PATH = "decoder.layers.2.self_attention."


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("a", [2, 4])
@pytest.mark.parametrize("b", [1, 2, 3, 4, 6, 12])
def test_any_size_to_any_other_that_divides(name: str, a: int, b: int) -> None:
    model = MODELS[name]
    source_sizes, other = (
        Topology(tp=tp, ep=2 if model.experts else 1, etp=1 if model.experts else None)
        for tp in (a, b)
    )
    store, catalog = model.catalog(source_sizes)
    source = unshard(catalog, rules=RULES)
    assert facet_of(source, MegatronModel).is_down_proj_cut is ("cut" in name)
    for key, array in model.tensors().items():
        assert tensor_bytes(source, store, key).tobytes() == array.tobytes(), key
    target = shard(source, other, rules=RULES)
    arrays = filled(target, source, store)  # type: ignore[arg-type]
    ranks = ranks_of(target)
    wanted: dict[str, np.ndarray] = {}
    for rank in other.ranks():
        folder = rank_dir(other, rank)
        expected = model.held(rank, other)["model"]
        wanted |= {f"{folder}:model.{key}": array for key, array in expected.items()}
        assert list(as_mapping(ranks[other.coords(rank)][1]["model"]) or {}) == list(expected)
    assert set(arrays) == set(wanted)
    assert all(arrays[key].tobytes() == array.tobytes() for key, array in wanted.items())


@pytest.mark.parametrize("name", [name for name in MODELS if "joined" not in name])
def test_torch_dist_keeps_the_names_and_gives_the_same_files(name: str) -> None:
    model = MODELS[name]
    store, catalog = model.catalog(Topology(tp=2))
    once = unshard(catalog, rules=RULES)
    stacked = to_torch_dist(once, Topology(tp=4), rules=RULES)
    start = "decoder.layers.2." if model.experts else "decoder.layers."
    assert start + "input_layernorm.weight" in stacked.target.tensors
    assert start + "self_attention.linear_kv_down_proj.weight" in stacked.target.tensors
    assert not any("linear_qkv" in key for key in stacked.target.tensors)
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    assert set(again.tensors) == set(once.tensors)
    for key in once.tensors:
        assert (tensor_bytes(again, store, key) == tensor_bytes(once, store, key)).all()


def test_one_rank_of_the_local_implementation_is_cut_as_that_does() -> None:
    model = MODELS["down projections cut"]
    for topology in (Topology(), Topology(tp=2)):
        store, catalog = model.catalog(topology)
        source = unshard(catalog, rules=RULES)
        stacked = to_torch_dist(source, topology, rules=RULES).source
        for form in (source, unshard(replace(stacked, format="torch_dist"), rules=RULES)):
            assert facet_of(form, MegatronModel).is_down_proj_cut is True
            arrays = filled(shard(form, Topology(tp=4), rules=RULES), form, store)  # type: ignore[arg-type]
            assert arrays[f"mp_rank_03:model.{PATH}linear_kv_down_proj.weight"].shape == (3, 12, 4)


def test_heads_limit_the_sizes() -> None:
    _, catalog = FUSED.catalog(Topology())
    with pytest.raises(
        UnsupportedError,
        match=r"12 attention heads are not divisible by TP 5.*: 1, 2, 3, 4, 6, 12$",
    ):
        shard(unshard(catalog, rules=RULES), Topology(tp=5), rules=RULES)


def test_query_groups_mean_nothing_here() -> None:
    model = replace(FUSED, more_args={"group_query_attention": True, "num_query_groups": 5})
    _, catalog = model.catalog(Topology())
    assert shard(unshard(catalog, rules=RULES), Topology(tp=4), rules=RULES).tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 9}, r"13 rows \(kv_lora_rank \+ qk_pos_emb_head_dim\), but it has 12"),
        ({"q_lora_rank": 16}, r"16 rows \(q_lora_rank\), but it has 12"),
        ({"v_head_dim": 6}, r"72 columns \(attention_inner\), but it has 60"),
        ({"qk_head_dim": "3"}, "qk_head_dim is '3', not a positive integer"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_sizes_that_contradict_the_shapes_are_corrupt(
    changes: dict[str, object], message: str, tp: int
) -> None:
    _, catalog = FUSED.catalog(Topology(tp=tp))
    with pytest.raises(CorruptError, match=message):
        unshard(replace(catalog, args=replaced(catalog.args, changes)), rules=RULES)


@pytest.mark.parametrize("name", ["joined", "joined, cut"])
def test_one_down_projection_becomes_two_in_torch_dist(name: str) -> None:
    model = MODELS[name]
    store, catalog = model.catalog(Topology(tp=2))
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=2), rules=RULES)
    start = "decoder.layers.self_attention.linear_"
    shapes = {
        key: tensor.shape for key, tensor in stacked.target.tensors.items() if "down_proj" in key
    }
    assert shapes == {
        start + "q_down_proj.weight": (4, 12, 12),
        start + "kv_down_proj.weight": (4, 12, 12),
    }
    assert filled(stacked.target, stacked.source, store)  # type: ignore[arg-type]
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    apart = np.concatenate(
        [
            tensor_bytes(again, store, f"{PATH}linear_{part}_down_proj.weight")
            for part in ("q", "kv")
        ]
    )
    assert apart.tobytes() == model.tensors()[PATH + "linear_qkv_down_proj.weight"].tobytes()


def test_the_argument_for_one_down_projection_follows_the_names() -> None:
    model = replace(MODELS["joined"], more_args={"mla_down_proj_fusion": True})
    _, catalog = model.catalog(Topology(tp=2))
    once = unshard(catalog, rules=RULES)
    apart = unshard(
        replace(to_torch_dist(once, Topology(), rules=RULES).source, format="torch_dist"),
        rules=RULES,
    )
    fusions = [
        fields_of(shard(form, Topology(), rules=RULES).args)["mla_down_proj_fusion"]
        for form in (once, apart)
    ]
    assert fusions == [True, False]
