"""Layouts that no golden checkpoint has, on synthetic models: odd sizes, Transformer Engine's
names, uneven stages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.facets import MegatronModel, RankFacts
from core.errors import CorruptError, MissingShardError, UnknownTensorError, UnsupportedError
from core.files.store import MemoryStore
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.objects import state_dict
from core.pickle.inert import make_namespace
from tests.megatron.support.megatron_gold import RULES, filled
from tests.megatron.support.synthetic import Model
from tests.support.facets import facet_of, ranks_of, with_facts, with_facts_of, without_facts
from tests.support.materialize import tensor_bytes

TP = [1, 2, 3, 4, 6, 12]


def check(model: Model, store: MemoryStore, source: Catalog, target: Topology) -> TargetCatalog:
    """Reshards and compares with the plain cutting; returns the target catalog."""
    sharded = shard(source, target, rules=RULES)
    arrays = filled(sharded, source, store)  # type: ignore[arg-type]
    wanted = {
        f"{folder}:model.{name}": array
        for folder, arrays in model.files(target).items()
        for name, array in arrays.items()
    }
    assert set(arrays) == set(wanted)
    for name, array in wanted.items():
        assert arrays[name].tobytes() == array.tobytes(), name
    return sharded


@pytest.mark.each_value
@pytest.mark.parametrize("a", TP)
@pytest.mark.parametrize("b", TP)
def test_any_size_to_any_other_that_divides(a: int, b: int) -> None:
    model = Model(layers=2)
    store, catalog = model.catalog(Topology(tp=a))
    check(model, store, unshard(catalog, rules=RULES), Topology(tp=b, pp=2))


@pytest.mark.parametrize(
    "model",
    [
        Model(is_gated=False),
        Model(is_tied=True),
        Model(is_fused=True),
        Model(heads=8, groups=2, head_dim=3),
        Model(is_tied=True, is_fused=True, is_gated=False, has_qk_norm=False),
    ],
)
@pytest.mark.parametrize(
    ("a", "b"), [("1.1", "4.2"), ("2.4", "1.1"), ("4.1", "2.2"), ("2.2", "4.4")]
)
def test_kinds_of_models(model: Model, a: str, b: str) -> None:
    first, other = (Topology(tp=int(text[0]), pp=int(text[2])) for text in (a, b))
    store, catalog = model.catalog(first)
    check(model, store, unshard(catalog, rules=RULES), other)


def test_stages_of_uneven_length() -> None:
    uneven = Model(
        layers=5,
        counts=(1, 3, 1),
        more_args={"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1},
    )
    store, catalog = uneven.catalog(Topology(tp=2, pp=3))
    source = unshard(catalog, rules=RULES)
    check(uneven, store, source, Topology(tp=1, pp=3))
    sharded = check(replace(uneven, counts=None), store, source, Topology(tp=2, pp=5))
    assert fields_of(sharded.args)["decoder_first_pipeline_num_layers"] is None


def test_stages_that_count_embedding_and_loss() -> None:
    model = Model(
        layers=4,
        counts=(1, 2, 1),
        more_args={
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    )
    store, catalog = model.catalog(Topology(pp=3))
    source = unshard(catalog, rules=RULES)
    check(replace(model, counts=(2, 2)), store, source, Topology(pp=2))
    check(replace(model, counts=(4,)), store, source, Topology(tp=2))


def test_transformer_engines_extra_states_become_objects_in_torch_dist() -> None:
    model = Model(is_fused=True)
    store, catalog = model.catalog(Topology(tp=2))
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=2, pp=2), rules=RULES)
    key = "decoder.layers.mlp.linear_fc1._extra_state/shard_3_4"
    assert key in stacked.target.objects
    assert not any("_extra_state" in name for name in stacked.target.tensors)
    assert "decoder.layers.3.mlp.linear_fc1._extra_state" in stacked.target.hidden
    arrays = filled(stacked.target, stacked.source, store)  # type: ignore[arg-type]
    assert arrays["decoder.layers.3.mlp.linear_fc1._extra_state"].tobytes() == bytes(range(7))


def test_torch_dist_and_back_is_the_same() -> None:
    for model in (Model(is_fused=True), Model(), Model(is_tied=True)):
        store, catalog = model.catalog(Topology(tp=2, pp=2))
        once = unshard(catalog, rules=RULES)
        stacked = to_torch_dist(once, Topology(tp=4), rules=RULES).source
        again = unshard(replace(stacked, format="torch_dist"), rules=RULES)
        assert set(again.tensors) == set(once.tensors)
        for key in once.tensors:
            assert (tensor_bytes(again, store, key) == tensor_bytes(once, store, key)).all()  # type: ignore[arg-type]
        check(model, store, again, Topology(tp=2))


def test_layers_that_differ_keep_their_own_keys() -> None:
    model = Model(layers=2, has_qk_norm=False)
    files = model.files(Topology())
    wide = files["mp_rank_00"]
    wide["decoder.layers.1.mlp.linear_fc1.weight"] = np.ones((96, 12), np.float32)
    wide["decoder.layers.1.mlp.linear_fc2.weight"] = np.ones((12, 48), np.float32)
    _, catalog = model.catalog(Topology(), files=files)
    target = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=2), rules=RULES).target
    assert target.tensors["decoder.layers.1.mlp.linear_fc1.weight"].shape == (96, 12)
    assert target.tensors["decoder.layers.0.mlp.linear_fc1.weight"].shape == (48, 12)
    assert "decoder.layers.mlp.linear_fc1.weight" not in target.tensors


def test_a_nested_state_dict_with_megatrons_names_is_understood() -> None:
    model = Model(is_tied=True)
    store, catalog = model.catalog(Topology(tp=2), opt_param_scheduler={"num_steps": 8})
    once = unshard(catalog, rules=RULES)
    nest = state_dict(once)
    again = unshard(replace(without_facts(nest), format="dcp"), rules=RULES)
    assert list(again.tensors) == list(once.tensors)
    assert again.iteration == 7
    assert again.common is not None and again.common["opt_param_scheduler"] == {"num_steps": 8}
    check(model, store, again, Topology(tp=4, pp=2))


def test_a_flat_state_dict_of_stacked_keys_is_understood() -> None:
    model = Model(is_fused=True)
    store, catalog = model.catalog(Topology(tp=2, pp=2))
    once = unshard(catalog, rules=RULES)
    stacked = to_torch_dist(once, Topology(tp=2), rules=RULES)
    flat = state_dict(with_facts_of(stacked.source, stacked.target).without_facets(MegatronModel))
    assert "decoder.layers.mlp.linear_fc2.weight" in flat.tensors
    again = unshard(replace(without_facts(flat), format="dcp"), rules=RULES)
    assert set(again.tensors) == set(once.tensors)
    assert all(item.value is None for item in again.objects.values())
    check(model, store, again, Topology(tp=4))


def test_without_arguments_there_is_no_layout() -> None:
    model = Model()
    _, catalog = model.catalog(Topology())
    nest = state_dict(replace(unshard(catalog, rules=RULES), common={}))
    with pytest.raises(UnsupportedError, match="no training arguments"):
        unshard(without_facts(nest), rules=RULES)


def test_names_that_are_not_megatrons_are_refused() -> None:
    _, catalog = Model().catalog(Topology())
    other = replace(
        without_facts(catalog),
        tensors={"model.layers.0.mlp.up_proj.weight": next(iter(catalog.tensors.values()))},
    )
    with pytest.raises(
        UnsupportedError, match=r"are not Megatron's \(for example, 'model.layers.0"
    ):
        unshard(other, rules=RULES)


def broken(
    model: Model, topology: Topology, folder: str, name: str, array: np.ndarray | None
) -> Catalog:
    files = model.files(topology)
    if array is None:
        del files[folder][name]
    else:
        files[folder][name] = array
    return model.catalog(topology, files=files)[1]


@pytest.mark.parametrize(
    ("folder", "name", "array", "error", "message"),
    [
        (
            "mp_rank_01",
            "decoder.layers.1.mlp.linear_fc2.weight",
            None,
            MissingShardError,
            "is in mp_rank_00, but not here",
        ),
        (
            "mp_rank_00",
            "output_layer.weight",
            None,
            MissingShardError,
            "is in mp_rank_01, but not here",
        ),
        (
            "mp_rank_01",
            "decoder.layers.0.extra.weight",
            np.ones((2, 3)),
            MissingShardError,
            "mp_rank_01",
        ),
        (
            "mp_rank_01",
            "output_layer.weight",
            np.ones((4, 12), np.float32),
            CorruptError,
            r"shape \(4, 12\) here",
        ),
        ("mp_rank_01", "output_layer.weight", np.ones((20, 12)), CorruptError, "float64 of shape"),
    ],
)
def test_ranks_that_disagree_are_reported(
    folder: str, name: str, array: np.ndarray | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        unshard(broken(Model(), Topology(tp=2), folder, name, array), rules=RULES)


def test_a_tensor_that_no_rank_has_is_missed() -> None:
    for name in (
        "output_layer.weight",
        "embedding.word_embeddings.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
    ):
        with pytest.raises(MissingShardError) as caught:
            unshard(broken(Model(), Topology(), "mp_rank_00", name, None), rules=RULES)
        assert caught.value.key == name


def test_an_unknown_tensor_is_reported_with_its_shapes() -> None:
    catalog = broken(
        Model(), Topology(), "mp_rank_00", "decoder.layers.0.gadget.weight", np.ones((5, 6))
    )
    with pytest.raises(UnknownTensorError, match="5×6"):
        unshard(catalog, rules=RULES)


def test_old_checkpoint_versions_are_refused() -> None:
    _, catalog = Model().catalog(Topology(), checkpoint_version=1.0)
    with pytest.raises(UnsupportedError, match="checkpoint_version is 1.0"):
        unshard(catalog, rules=RULES)


def test_entries_that_differ_between_ranks_are_left_out_with_a_note() -> None:
    model = Model()
    _, catalog = model.catalog(Topology(tp=2), shared={"a": [1, (2, None)]}, own=[0])
    ranks = ranks_of(catalog)
    coords = (("tp", 1), ("pp", 0))
    folder, root = ranks[coords]
    ranks[coords] = (folder, {**root, "own": [1]})
    unsharded = unshard(with_facts(catalog, RankFacts, ranks=ranks), rules=RULES)
    assert unsharded.common is not None and unsharded.common["shared"] == {"a": [1, (2, None)]}
    assert "own" not in unsharded.common
    assert tuple(map(str, unsharded.dropped)) == ("own (not the same on all ranks)",)
    target = shard(unsharded, Topology(), rules=RULES)
    assert ranks_of(target)[(("tp", 0), ("pp", 0))][1]["shared"] == {"a": [1, (2, None)]}


@pytest.mark.parametrize("entries", [{"opt_param_scheduler": {"num_steps": 99}}, {"iteration": 20}])
def test_ranks_of_different_steps_are_refused(entries: dict[str, object]) -> None:
    _, catalog = Model().catalog(Topology(tp=2), opt_param_scheduler={"num_steps": 80})
    ranks = ranks_of(catalog)
    coords = (("tp", 1), ("pp", 0))
    folder, root = ranks[coords]
    ranks[coords] = (folder, {**root, **entries})
    with pytest.raises(CorruptError, match="differs from the value in mp_rank_00") as caught:
        unshard(with_facts(catalog, RankFacts, ranks=ranks), rules=RULES)
    assert caught.value.rank == "mp_rank_01"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": "[M-]*-E"}, "kind '\\['"),
        ({"heterogeneous_layers_config_path": "layers.json"}, "only the path of their description"),
        ({"expert_model_parallel_size": 2}, "EP 2"),
        ({"num_layers": None}, "have no num_layers"),
    ],
)
def test_arguments_of_other_models_are_refused(changes: dict[str, object], message: str) -> None:
    model = Model(more_args=changes)
    _, catalog = model.catalog(Topology())
    with pytest.raises(UnsupportedError, match=message):
        unshard(catalog, rules=RULES)


def test_the_null_tokenizer_has_one_token_more_than_it_says() -> None:
    model = Model(more_args={"tokenizer_type": "NullTokenizer", "vocab_size": 39})
    _, catalog = model.catalog(Topology(tp=2))
    assert facet_of(unshard(catalog, rules=RULES), MegatronModel).vocab_size == 40
    newer = Model(more_args={"tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": None})
    assert (
        facet_of(unshard(newer.catalog(Topology(tp=2))[1], rules=RULES), MegatronModel).vocab_size
        == 40
    )


def test_a_vocabulary_size_that_does_not_explain_the_rows_is_not_used() -> None:
    model = Model(more_args={"vocab_size": 20})
    _, catalog = model.catalog(Topology(tp=2))
    source = unshard(catalog, rules=RULES)
    assert facet_of(source, MegatronModel).vocab_size is None
    assert source.tensors["output_layer.weight"].shape == (40, 12)
    assert any("does not explain the 40 stored rows" in note for note in source.notes)
    with pytest.raises(UnsupportedError, match="--vocab-size"):
        shard(source, Topology(tp=4), rules=RULES)
    assert unshard(catalog, rules=RULES, vocab_size=38).tensors["output_layer.weight"].shape == (
        38,
        12,
    )


def test_a_vocabulary_without_padding_stays_without() -> None:
    model = Model(
        divisible_by=1,
        vocab=48,
        more_args={"pad_vocab_size": False, "make_vocab_size_divisible_by": 128},
    )
    store, catalog = model.catalog(Topology(tp=4))
    check(model, store, unshard(catalog, rules=RULES), Topology(tp=6))


def test_arguments_are_updated_only_where_they_exist() -> None:
    model = Model(more_args={"sequence_parallel": True, "world_size": 8, "data_parallel_size": 4})
    _, catalog = model.catalog(Topology(tp=2))
    fields = fields_of(shard(unshard(catalog, rules=RULES), Topology(pp=2), rules=RULES).args)
    assert fields["sequence_parallel"] is False
    assert fields["world_size"] == 8
    assert fields["tensor_model_parallel_size"] == 1
    assert fields["pipeline_model_parallel_size"] == 2
    assert fields["padded_vocab_size"] == 40
    assert "inprocess_active_world_size" not in fields
    assert catalog.args is not None and fields_of(catalog.args)["tensor_model_parallel_size"] == 2


def test_namespaces_keep_their_class() -> None:
    from core.megatron.model.args import replaced

    args = make_namespace({"a": 1, "b": 2})
    changed = replaced(args, {"b": 3, "c": 4})
    assert type(changed) is type(args)
    assert fields_of(changed) == {"a": 1, "b": 3}
    assert fields_of(args) == {"a": 1, "b": 2}
