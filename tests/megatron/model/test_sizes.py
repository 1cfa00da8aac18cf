"""Sizes that divide and sizes that do not: heads, groups, gates, vocabularies, experts; what the
errors say.
"""

from __future__ import annotations

import numpy as np
import pytest

from core.engine.plan.match import match
from core.errors import CheckpointingException, CorruptError, UnsupportedError, UsageError
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from tests.megatron.reshard.test_layouts import check
from tests.megatron.support.megatron_gold import RULES, filled
from tests.megatron.support.synthetic import Arrays, Model
from tests.support.facets import ranks_of


@pytest.mark.parametrize(("a", "b"), [(6, 4), (4, 6), (8, 6), (6, 8), (12, 8)])
def test_sizes_that_do_not_divide_each_other_meet_in_fractions(a: int, b: int) -> None:
    model = Model(layers=2, heads=24, groups=24, head_dim=2, ffn=48, hidden=24)
    store, catalog = model.catalog(Topology(tp=a))
    source = unshard(catalog, rules=RULES)
    target = check(model, store, source, Topology(tp=b))
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    pairs = match(key, source.tensors[key], target.tensors[key]).pairs
    assert len(pairs) == a + b - np.gcd(a, b)


def refused(
    model: Model, target: Topology, error: type[CheckpointingException] = UnsupportedError
) -> str:
    """What the refusal of a target says, one layer of the model and its hint."""
    _, catalog = model.catalog(Topology())
    with pytest.raises(error) as caught:
        shard(unshard(catalog, rules=RULES), target, rules=RULES)
    return f"{caught.value.key}: {caught.value.message}; {caught.value.hint}"


def test_heads_that_do_not_divide_list_the_sizes_that_do() -> None:
    text = refused(Model(layers=1, heads=28, groups=28, ffn=56), Topology(tp=8))
    assert "28 attention heads are not divisible by TP 8" in text
    assert text.endswith("TP sizes that work: 1, 2, 4, 7, 14, 28")


def test_more_tensor_ranks_than_groups_cut_the_fused_rows_plainly() -> None:
    model = Model(layers=1, heads=32, groups=4, head_dim=2, ffn=64, hidden=32)
    store, catalog = model.catalog(Topology(tp=2))
    source = unshard(catalog, rules=RULES)
    target = check(model, store, source, Topology(tp=16))
    again = unshard(model.catalog(Topology(tp=16))[1], rules=RULES)
    assert again.tensors == source.tensors
    check(model, model.catalog(Topology(tp=16))[0], again, Topology(tp=8))
    assert len(ranks_of(target)) == 16
    note = (
        "TP 16 exceeds the number of query groups (4), so only megatron-core 0.16 and later can "
        "load the files"
    )
    assert note in target.notes
    assert not any(
        "query groups" in text for text in shard(source, Topology(tp=4), rules=RULES).notes
    )


def test_tensor_ranks_and_groups_that_do_not_divide_each_other_are_refused() -> None:
    text = refused(Model(layers=1, heads=12, groups=6, ffn=24), Topology(tp=4))
    assert "TP 4 is neither a divisor nor a multiple of the 6 query groups" in text
    assert text.endswith("TP sizes that work: 1, 2, 3, 6, 12")


def test_a_gate_that_does_not_divide_names_the_tensor_and_the_extent_of_a_part() -> None:
    text = refused(Model(layers=1, heads=12, groups=12, ffn=20), Topology(tp=6))
    assert text.startswith(
        "decoder.layers.0.mlp.linear_fc1.weight: 20 elements of axis 0 are not divisible by TP 6"
    )
    assert text.endswith("TP sizes that work: 1, 2, 4, 5, 10, 20")


def test_experts_that_do_not_divide_list_the_sizes_that_do() -> None:
    model = Model(layers=1, experts=6, moe=(0,), expert_ffn=10)
    assert refused(model, Topology(ep=4)).endswith("EP sizes that work: 1, 2, 3, 6")
    text = refused(model, Topology(tp=4, etp=4))
    assert "local_experts.0.linear_fc1.weight" in text
    assert "10 elements of axis 0 are not divisible by ETP 4" in text


def test_a_plain_mlp_has_one_part() -> None:
    model = Model(layers=1, is_gated=False, ffn=24)
    store, catalog = model.catalog(Topology(tp=4))
    source = unshard(catalog, rules=RULES)
    assert not any("gated" in note for note in source.notes)
    check(model, store, source, Topology(tp=3))


@pytest.mark.parametrize("experts", [0, 4])
def test_a_gate_that_the_arguments_do_not_name_is_seen_in_the_shapes(experts: int) -> None:
    model = Model(
        layers=2, experts=experts, moe=(1,) if experts else (), more_args={"swiglu": False}
    )
    store, catalog = model.catalog(Topology(tp=4))
    source = unshard(catalog, rules=RULES)
    assert source.notes[0].startswith("the shapes of fc1 and fc2 show gated MLPs")
    check(model, store, source, Topology(tp=6, pp=2))
    stacked = to_torch_dist(source, Topology(tp=2), rules=RULES)
    key = f"decoder.layers.{'0.' if experts else ''}mlp.linear_fc1.weight"
    rows = {piece.box.shape[-2] for piece in stacked.target.fragments(key)}
    assert rows == {12}
    filled(stacked.target, stacked.source, store)  # type: ignore[arg-type]
    again = unshard(stacked.source, rules=RULES)
    check(model, store, again, Topology(tp=3))


def reshaped(model: Model, folder: str, changes: Arrays) -> dict[str, Arrays]:
    files = model.files(Topology())
    files[folder] |= changes
    return files


def test_a_gate_that_the_arguments_name_and_the_shapes_have_not_is_a_contradiction() -> None:
    model = Model(layers=1, is_gated=False, more_args={"swiglu": True})
    with pytest.raises(
        CorruptError, match="fc1 should have 48 rows for 24 columns of fc2, but it has 24"
    ) as caught:
        unshard(model.catalog(Topology())[1], rules=RULES)
    assert "swiglu" in (caught.value.hint or "")


@pytest.mark.parametrize("rows", [24, 30])
def test_layers_whose_gates_contradict_each_other_are_corrupt(rows: int) -> None:
    model = Model(layers=2, more_args={"swiglu": False})
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    files = reshaped(model, "mp_rank_00", {name: np.ones((rows, 12), np.float32)})
    with pytest.raises(
        CorruptError, match=f"a gated MLP .*should have 48 rows .* but it has {rows}"
    ) as caught:
        unshard(model.catalog(Topology(), files=files)[1], rules=RULES)
    assert caught.value.key == name


@pytest.mark.parametrize(
    ("a", "b", "rows"), [(8, 4, 50688), (1, 8, 51200), (8, 1, 50304), (4, 2, 50432)]
)
def test_the_padding_of_a_vocabulary_follows_the_tensor_ranks(a: int, b: int, rows: int) -> None:
    model = Model(
        layers=1,
        hidden=8,
        heads=8,
        groups=8,
        ffn=8,
        vocab=50257,
        divisible_by=128,
        has_qk_norm=False,
    )
    store, catalog = model.catalog(Topology(tp=a))
    target = check(model, store, unshard(catalog, rules=RULES), Topology(tp=b))
    head = target.tensors["output_layer.weight"]
    assert head.shape[0] == rows and head.flexible


def test_a_vocabulary_that_nothing_tells_needs_the_users_word() -> None:
    model = Model(layers=1, vocab=38, more_args={"vocab_size": None})
    _, catalog = model.catalog(Topology(tp=2))
    source = unshard(catalog, rules=RULES)
    with pytest.raises(
        UnsupportedError, match="unknown how many of the 40 rows are padding"
    ) as caught:
        shard(source, Topology(tp=3), rules=RULES)
    assert "--vocab-size" in (caught.value.hint or "")
    sized = unshard(catalog, rules=RULES, vocab_size=38)
    assert shard(sized, Topology(tp=3), rules=RULES).tensors["output_layer.weight"].shape == (
        48,
        12,
    )


def test_a_vocabulary_above_the_stored_rows_is_refused() -> None:
    _, catalog = Model(layers=1).catalog(Topology(tp=2))
    with pytest.raises(
        UsageError, match="a vocabulary of 41 tokens does not fit in the 40 stored rows"
    ):
        unshard(catalog, rules=RULES, vocab_size=41)
