"""core.megatron.optimizer.flat.read: parameters out of the distributed optimizer's flat buffers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.optimizer_keys import split_state_key, state_key
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.args import parse_facts
from core.megatron.model.topology import Topology
from core.megatron.optimizer.flat.buffers import bucketing_of, is_shared_embedding
from core.megatron.optimizer.flat.layout import FlatParam, FlatSpace, find_starts, find_trained
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import Global, as_mapping
from tests.megatron.support.flat_files import STATES, Run, with_optimizer
from tests.megatron.support.megatron_gold import RULES, _bytes, fused, rank_files
from tests.megatron.support.synthetic import Model
from tests.support.facets import facet_of, ranks_of, with_facts
from tests.support.materialize import Bytes, tensor_bytes

GOLD = ("tp1_pp1_dp2_distopt", "tp2_pp1_dp2_distopt")
DENSE = Model(layers=4, vocab=37, divisible_by=5, hidden=10, heads=6, groups=6, head_dim=5, ffn=12)
TIED = replace(DENSE, is_tied=True)
EXPERTS = Model(layers=2, experts=4, moe=(0, 1), expert_names="te_grouped", is_fused=True, shared=6)


@cache
def optim_oracle(golden: Path, model: str) -> dict[str, Bytes]:
    """The true optimizer states, ``<state>.<fused name>``, as the global form calls the states."""
    with safe_open(golden / "oracle" / model / "global_optim.safetensors", framework="pt") as file:
        return {key.replace("|", "."): _bytes(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def assert_true_states(unsharded: Catalog, store: ReadStore, golden: Path, model: str) -> None:
    """The states are those of the oracle, all of them, bit for bit."""
    true = optim_oracle(golden, model)
    states = {key: name for key in unsharded.tensors if (name := split_state_key(key)) is not None}
    assert {f"{state}.{fused(param)}" for state, param in states.values()} == set(true)
    for key, (state, param) in states.items():
        values = tensor_bytes(unsharded, store, key)
        assert values.shape == true[f"{state}.{fused(param)}"].shape
        assert (values == true[f"{state}.{fused(param)}"]).all(), key


@pytest.mark.parametrize("case", GOLD)
def test_states_out_of_megatrons_files_are_the_true_ones(golden: Path, case: str) -> None:
    store, catalog = rank_files(golden, "dense_gqa", case)
    model = unshard(catalog, rules=RULES, store=store)
    assert_true_states(model, store, golden, "dense_gqa")
    optimizer = model.optimizer
    assert optimizer is not None
    assert (optimizer.kind, optimizer.states) == ("distributed", ("exp_avg", "exp_avg_sq"))
    assert [group.settings["wd_mult"] for group in optimizer.groups] == [1.0, 0.0]
    assert not any("buffer" in note for note in model.notes)


@pytest.mark.parametrize("case", GOLD)
def test_every_parameter_lies_where_megatron_recorded_it(golden: Path, case: str) -> None:
    store, catalog = rank_files(golden, "dense_gqa", case)
    unsharded = unshard(catalog, rules=RULES, store=store, keep_padded_vocab=True)
    recorded = json.loads(
        (golden / "oracle" / "mapping" / f"mcore_legacy__dense_gqa__{case}.json").read_text()
    )
    flat = {}
    for rank in recorded["ranks"]:
        (buffer,) = rank["distrib_optim_flat"]
        for row in buffer["params"]:
            flat[rank["file"].split("/")[1], row["name"]] = (row["start"], row["end"])
    ours = {}
    for key in unsharded.tensors:
        state, name = split_state_key(key) or ("", "")
        for fragment in unsharded.fragments(key) if state == "fp32_param" else ():
            assert fragment.array is not None
            folder, _, place = fragment.array.name.partition(":")
            start, end = place[place.index("[") + 1 : -1].split(":")
            ours[folder, name] = (int(start), int(end))
    assert ours == flat


def true_state(model: Model, state: str, param: str) -> np.ndarray:
    return model.tensors()[param] * np.float32(STATES["param" if state == "fp32_param" else state])


def assert_states(model: Model, store: ReadStore, unsharded: Catalog) -> None:
    """Every parameter of a synthetic model has its states."""
    wanted = [name for name in model.tensors() if not name.endswith("expert_bias")]
    assert {key for key in unsharded.tensors if split_state_key(key)} == {
        state_key("fp32_param" if state == "param" else state, name)
        for name in wanted
        for state in STATES
    }
    for key in unsharded.tensors:
        state = split_state_key(key)
        if state is not None:
            values = tensor_bytes(unsharded, store, key)
            true = true_state(model, *state)
            assert values.tobytes() == true.tobytes(), key


SIZES = [
    (DENSE, Topology(2, 2)),
    (DENSE, Topology(1, 2, vpp=2)),
    (TIED, Topology(1, 2)),
    (TIED, Topology(1, 1)),
    (EXPERTS, Topology(1, 1)),
    (EXPERTS, Topology(1, 1, ep=2)),
    (EXPERTS, Topology(2, 2, ep=2, etp=1)),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "topology"), SIZES)
@pytest.mark.parametrize("run", [Run(), Run(bucket_size=500), Run(bucket_size=1)])
def test_states_of_every_layout_are_read(model: Model, topology: Topology, run: Run) -> None:
    store, catalog = with_optimizer(model, topology, run)
    unsharded = unshard(catalog, rules=RULES, store=store)
    assert_states(model, store, unsharded)
    assert not any("buffer" in note for note in unsharded.notes)


@pytest.mark.first(3)
@pytest.mark.parametrize(("model", "topology"), SIZES)
def test_files_from_before_buckets_were_coalesced_are_read(
    model: Model, topology: Topology
) -> None:
    store, catalog = with_optimizer(model, topology, Run(bucket_size=700, is_listed=True, align=1))
    assert_states(model, store, unshard(catalog, rules=RULES, store=store))


def test_the_first_model_chunk_may_have_an_optimizer_of_its_own() -> None:
    run = Run(bucket_size=100, is_chunk_alone=True)
    store, catalog = with_optimizer(DENSE, Topology(1, 2, vpp=2), run)
    unsharded = unshard(catalog, rules=RULES, store=store)
    assert_states(DENSE, store, unsharded)
    optimizer = unsharded.optimizer
    assert optimizer is not None and len(optimizer.groups) == 2


@pytest.mark.parametrize(("is_tied", "n_predictions"), [(True, 0), (False, 1), (False, 0)])
def test_embeddings_that_stages_share_are_known(is_tied: bool, n_predictions: int) -> None:
    args = replace(DENSE, is_tied=is_tied).args(Topology(1, 2)) | {
        "mtp_num_layers": n_predictions or None
    }
    facts = parse_facts(args)

    def is_shared(name: str, pp: int) -> bool:
        return is_shared_embedding(name, Topology(1, pp), facts, RULES)

    assert is_shared("embedding.word_embeddings.weight", 2) == (is_tied or n_predictions > 0)
    assert is_shared("output_layer.weight", 2) == is_tied
    assert not is_shared("decoder.layers.0.mlp.linear_fc1.weight", 2)
    assert not is_shared("embedding.word_embeddings.weight", 1)


def test_buckets_that_the_arguments_do_not_tell_are_discovered_with_a_note() -> None:
    store, catalog = with_optimizer(
        DENSE,
        Topology(2, 1),
        Run(bucket_size=400),
        args={"ddp_bucket_size": None, "overlap_grad_reduce": False},
    )
    unsharded = unshard(catalog, rules=RULES, store=store)
    assert_states(DENSE, store, unsharded)
    assert any(
        "mp_rank_00: ckpt found the parameters' offsets in the optimizer's buffer 0" in note
        for note in unsharded.notes
    )


def test_without_values_buckets_are_not_discovered() -> None:
    args = {"ddp_bucket_size": None, "overlap_grad_reduce": False}
    _, catalog = with_optimizer(DENSE, Topology(2, 1), Run(bucket_size=400), args=args)
    with pytest.raises(UnsupportedError, match="fits none of Megatron's layouts"):
        unshard(catalog, rules=RULES)


def test_the_arguments_are_believed_where_there_are_no_values() -> None:
    store, catalog = with_optimizer(DENSE, Topology(2, 1), Run(bucket_size=400))
    assert_states(DENSE, store, unshard(catalog, rules=RULES))


def test_a_buffer_in_another_order_is_refused_with_the_place() -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 1), Run())
    name = next(name for name in store.contents if "distrib_optim.0.0.param" in name)
    data = np.frombuffer(store.contents[name], np.float32)
    store.contents[name] = bytearray(data[::-1].tobytes())
    with pytest.raises(
        UnsupportedError, match="master weights of output_layer.weight should be elements 0–400"
    ):
        unshard(catalog, rules=RULES, store=store)


def test_values_that_fit_several_places_are_refused() -> None:
    space = FlatSpace(
        params=[FlatParam(name, n) for name, n in (("a", 1), ("b", 3), ("c", 3), ("d", 5))],
        n_elements=132,
        buckets=None,
        bucketing=bucketing_of({"overlap_grad_reduce": False}),
        chunk=(0, 0),
        n_rank=12,
        label="buffer 0",
        rank="mp_rank_00",
    )
    with pytest.raises(
        UnsupportedError, match="ambiguous, because b may begin at several elements"
    ):
        find_starts(space, lambda place, start: True)
    result = find_starts(space, lambda place, start: start != 67)
    assert result.starts == [131, 128, 64, 0]
    assert len(result.notes) == 1
    with pytest.raises(UnsupportedError, match="has 132 elements and its 4 parameters have 12"):
        find_starts(space, lambda place, start: start != 64)


def test_optimizers_that_other_ranks_hold_are_taken_from_them() -> None:
    topology = Topology(1, 1, ep=2)
    store, catalog = with_optimizer(EXPERTS, topology, Run(), absent={"mp_rank_00_001": [0]})
    assert_states(EXPERTS, store, unshard(catalog, rules=RULES, store=store))


def test_an_optimizer_that_no_rank_holds_is_missing() -> None:
    topology = Topology(1, 1, ep=2)
    store, catalog = with_optimizer(EXPERTS, topology, Run(), absent={"mp_rank_00_001": [1]})
    with pytest.raises(MissingShardError, match="no distrib_optim.pt contains the optimizer state"):
        unshard(catalog, rules=RULES, store=store)


def _edited(catalog: Catalog, change: object) -> Catalog:
    """A catalog whose first file's content is changed by ``change(buffer entry, its key)``."""
    files = dict(facet_of(catalog, RankFacts).optim_files)
    coords, content = next(iter(files.items()))
    files[coords] = change(dict(as_mapping(content) or {}))  # type: ignore[operator]
    return with_facts(catalog, RankFacts, optim_files=files)


def test_contents_that_contradict_the_model_are_refused() -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 1), Run())
    uint8 = (Global("torch", "uint8"), Global("torch", "float32"))
    half = (Global("torch", "bfloat16"), Global("torch", "float32"))

    def refused(change: object, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            unshard(_edited(catalog, change), rules=RULES, store=store)

    def keyed(key: object) -> object:
        return lambda content: content | {0: {key: next(iter(content[0].values()))}}

    def stating(n: int) -> object:
        return lambda content: (
            content
            | {0: {key: {**value, "numel_unpadded": n} for key, value in content[0].items()}}
        )

    refused(keyed(uint8), UnsupportedError, "FP8 parameters")
    refused(
        keyed(half),
        CorruptError,
        "buffer 0 is for bfloat16 parameters, but should be for float32 parameters",
    )
    refused(keyed("x"), CorruptError, "not a pair of dtypes")
    refused(stating(5), CorruptError, "should have 5 elements")
    refused(
        lambda content: content | {1: content[0]}, CorruptError, "buffer 1 belongs to no parameter"
    )
    refused(
        lambda content: {"buckets_coalesced": True}, CorruptError, "no buffer contains embedding"
    )
    refused(lambda content: content | {2: content[0]}, CorruptError, "should be numbered from 0")
    refused(lambda content: [content, None, None], CorruptError, "contains 3 optimizers")
    refused(lambda content: {0: {}}, CorruptError, "a pair of dtypes")


def test_ranks_of_different_steps_are_refused() -> None:
    store, catalog = with_optimizer(DENSE, Topology(2, 1), Run())
    _, root = list(ranks_of(catalog).values())[1]
    entry = {
        "optimizer": {
            "param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "step": 4}]
        }
    }
    root["optimizer"] = entry
    with pytest.raises(CorruptError, match="of a param group is"):
        unshard(catalog, rules=RULES, store=store)


def test_steps_are_taken_from_ranks_that_count_them() -> None:
    for rank in (0, 1):
        store, catalog = with_optimizer(DENSE, Topology(2, 1), Run())
        groups = [
            root["optimizer"]["optimizer"]["param_groups"][0]
            for _, root in ranks_of(catalog).values()
        ]
        groups[1 - rank]["step"] = 3
        groups[rank].pop("step", None)
        optimizer = unshard(catalog, rules=RULES, store=store).optimizer
        assert optimizer is not None and optimizer.groups[0].settings["step"] == 3


def test_groups_that_some_ranks_leave_out_are_left_out_again() -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 2), Run())
    optimizer = unshard(catalog, rules=RULES, store=store).optimizer
    assert optimizer is not None and optimizer.omits_empty is None
    del list(ranks_of(catalog).values())[1][1]["optimizer"]["optimizer"]["param_groups"][1]
    optimizer = unshard(catalog, rules=RULES, store=store).optimizer
    assert optimizer is not None and optimizer.omits_empty is True


def test_scalers_that_differ_between_ranks_are_refused() -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 2), Run())
    list(ranks_of(catalog).values())[1][1]["optimizer"]["grad_scaler"]["growth_tracker"] = 4
    with pytest.raises(CorruptError, match="the optimizer's entry grad_scaler differs"):
        unshard(catalog, rules=RULES, store=store)


def test_parameters_that_are_not_trained_are_found_by_values() -> None:
    params = [FlatParam(name, 64) for name in "abcd"]
    space = FlatSpace(
        params=params,
        n_elements=128,
        buckets=None,
        bucketing=bucketing_of({"overlap_grad_reduce": False}),
        chunk=(0, 0),
        n_rank=256,
        label="buffer 0",
        rank="mp_rank_00",
    )
    # b and d are trained; buffers hold them in reverse order.
    at = {(3, 0), (1, 64)}
    assert find_trained(space, lambda place, start: (place, start) in at) == [None, 64, None, 0]
    # No such layout is as long as the buffer.
    assert find_trained(space, lambda place, start: (place, start) == (3, 0)) is None
    # a has the values of b.
    with pytest.raises(
        UnsupportedError, match="contains either b or a, but ckpt cannot tell which"
    ):
        find_trained(space, lambda place, start: (place, start) in {*at, (0, 64)})
