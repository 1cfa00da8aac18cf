"""core.megatron.optimizer.sharded.buckets: parameters out of the flat buckets of torch_dist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import lcm
from pathlib import Path

import numpy as np
import pytest

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.megatron.model.args import parse_facts
from core.megatron.model.topology import Rank, Topology
from core.megatron.optimizer.sharded.buckets import GlobalStates, has_buckets, read_buckets
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import Global, TensorLeaf, as_mapping, make_namespace
from tests.megatron.optimizer.flat.test_read import (
    DENSE,
    EXPERTS,
    TIED,
    assert_states,
    assert_true_states,
)
from tests.megatron.support.flat_files import GROUP, STATES, Run, members
from tests.megatron.support.megatron_gold import RULES, dist_files
from tests.megatron.support.synthetic import Model

GOLD = [
    ("mcore_torch_dist", "tp2_pp1_dp2_distopt_dpreshardable"),
    ("mcore0121_torch_dist", "tp2_pp1_dp2_distopt_dp_zero_gather_scatter"),
]


def joined(model: Catalog, states: GlobalStates) -> Catalog:
    """The model with its optimizer."""
    return replace(model, tensors={**model.tensors, **states.tensors})


@pytest.mark.parametrize(("family", "case"), GOLD)
def test_states_out_of_megatrons_buckets_are_the_true_ones(
    golden: Path, family: str, case: str
) -> None:
    store, catalog = dist_files(golden, family, "dense_gqa", case)
    assert has_buckets(catalog)
    model = unshard(catalog, rules=RULES, optim="drop")
    unsharded = read_buckets(catalog, model, parse_facts(catalog.args), RULES, store=store)
    assert (unsharded.optimizer.kind, unsharded.optimizer.states, unsharded.notes) == (
        "distributed",
        ("exp_avg", "exp_avg_sq"),
        [],
    )
    assert [group.settings["wd_mult"] for group in unsharded.optimizer.groups] == [1.0, 0.0]
    assert_true_states(joined(model, unsharded), store, golden, "dense_gqa")


def _rank(topology: Topology, number: int, *, is_expert: bool) -> Rank:
    """The first rank of a group, by what its number counts."""
    size = topology.expert_tp * topology.ep if is_expert else topology.tp
    wanted = (
        (number % topology.expert_tp, number // topology.expert_tp % topology.ep)
        if is_expert
        else number % size
    )
    return next(
        rank
        for rank in topology.ranks()
        if rank.pp == number // size and ((rank.etp, rank.ep) if is_expert else rank.tp) == wanted
    )


def bucketed(
    model: Model, topology: Topology, run: Run, *, pads: bool = False
) -> tuple[MemoryStore, Catalog, Catalog]:
    """A checkpoint whose weights are global and whose optimizer is in buckets: store, catalog, the
    model alone.

    Args:
        pads: the padding at the end of buckets is stored, as in ``fully_sharded_bucket_space``.
    """
    contents: dict[str, bytes | bytearray] = {}
    weights: dict[str, StoredArray] = {}
    chunks: dict[str, list[tuple[int, StoredArray]]] = {}
    objects: dict[str, StoredObject] = {}
    scales: dict[str, StoredArray] = {}

    def stored(name: str, array: np.ndarray) -> StoredArray:
        contents[name] = array.tobytes()
        return StoredArray(name, array.dtype.name, array.shape, Extent(name, 0))

    for name, array in model.tensors().items():
        weights[name] = stored(name, array)
    dtype = (Global("torch", "float32"), Global("torch", "float32"))
    for is_expert in (False, True) if topology.ep > 1 else (False,):
        n = topology.pp * (topology.expert_tp * topology.ep if is_expert else topology.tp)
        for number in range(n):
            rank = _rank(topology, number, is_expert=is_expert)
            start = f"chained_{int(is_expert)}." if topology.ep > 1 else ""
            start += f"optimizer.distributed.dp_group_idx_{number}."
            sizes: list[object] = []
            for n_buffer, buckets in enumerate(members(model, rank, topology, run)[is_expert]):
                sizes.append({dtype: [bucket.size for bucket in buckets]})
                for n_bucket, bucket in enumerate(buckets):
                    if pads:
                        step = lcm(run.dp, 128)
                        bucket = np.concatenate(
                            [bucket, np.full(-bucket.size % step, np.nan, np.float32)]
                        )
                    for state, factor in STATES.items():
                        key = (
                            f"{start}gbuf_idx_{n_buffer}.dtype_(torch.float32, torch.float32)."
                            f"bucket_idx_{n_bucket}.{state}"
                        )
                        cuts = sorted(
                            {
                                0,
                                bucket.size,
                                *np.random.default_rng(number).integers(0, bucket.size, 9),
                            }
                        )
                        chunks[key] = [
                            (int(a), stored(f"{key}@{a}", bucket[a:b] * np.float32(factor)))
                            for a, b in pairwise(cuts)
                        ]
            key = f"{start}grad_scaler/shard_0_1:0.scale"
            scales[key] = stored(key, np.array([1024], np.float32))
            for name, value in (
                ("grad_scaler", {"scale": TensorLeaf(key)}),
                ("per_bucket_numel_unpadded", sizes),
                ("optimizer", {"param_groups": [{**GROUP, "is_expert_parallel": is_expert}]}),
            ):
                objects[f"{start}{name}/shard_0_1"] = StoredObject(
                    f"{start}{name}/shard_0_1", value=[value]
                )
    args = make_namespace(
        model.args(topology) | {"data_parallel_size": run.dp, "use_distributed_optimizer": True}
    )
    plain = replace(
        catalog_of_arrays(format="torch_dist", arrays=weights),
        args=args,
        common={"args": args, "iteration": 7, "checkpoint_version": 3.0},
    )

    def fragments_of(key: str) -> Sequence[Fragment]:
        return [Fragment(Box((a,), array.shape), array, (0,)) for a, array in reversed(chunks[key])]

    tensors = {
        key: Tensor(
            "float32", (sum(array.shape[0] for _, array in pieces),), partial(fragments_of, key)
        )
        for key, pieces in chunks.items()
    }
    catalog = replace(plain, tensors={**plain.tensors, **tensors}, objects=objects)
    catalog = catalog.with_hidden(scales)
    return MemoryStore(contents), catalog, unshard(plain, rules=RULES)


def read(
    model: Model, topology: Topology, run: Run, *, without: str = "?", pads: bool = False
) -> tuple[MemoryStore, Catalog]:
    store, catalog, plain = bucketed(model, topology, run, pads=pads)
    tensors = {key: meta for key, meta in catalog.tensors.items() if without not in key}
    objects = {key: item for key, item in catalog.objects.items() if without not in key}
    catalog = replace(catalog, tensors=tensors, objects=objects)
    facts = parse_facts(catalog.args, names=RULES.model_of(plain.tensors))
    return store, joined(plain, read_buckets(catalog, plain, facts, RULES, store=store))


SIZES = [
    (DENSE, Topology(2, 2)),
    (TIED, Topology(1, 2)),
    (TIED, Topology(2, 1)),
    (EXPERTS, Topology(1, 1)),
    (EXPERTS, Topology(1, 1, ep=2)),
    (EXPERTS, Topology(2, 2, ep=2, etp=1)),
    (EXPERTS, Topology(2, 1, ep=2)),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "topology"), SIZES)
@pytest.mark.parametrize("run", [Run(), Run(bucket_size=500), Run(bucket_size=1, dp=6)])
@pytest.mark.parametrize("pads", [False, True])
def test_buckets_of_every_layout_are_read(
    model: Model, topology: Topology, run: Run, pads: bool
) -> None:
    store, unsharded = read(model, topology, run, pads=pads)
    assert_states(model, store, unsharded)


def test_tensors_of_the_other_entries_are_copies_of_one() -> None:
    store, catalog, plain = bucketed(DENSE, Topology(2, 1), Run())
    unsharded = read_buckets(catalog, plain, parse_facts(catalog.args), RULES, store=store)
    leaf = (as_mapping(unsharded.optimizer.entries["grad_scaler"]) or {})["scale"]
    assert leaf == TensorLeaf("optimizer.grad_scaler.scale")
    assert unsharded.hidden[leaf.key].shape == (1,)
    assert len(unsharded.hidden[leaf.key].fragments()) == 2


def test_what_is_missing_is_named() -> None:
    with pytest.raises(MissingShardError, match=r"dp_group_idx_1\)"):
        read(DENSE, Topology(2, 1), Run(), without="dp_group_idx_1")
    with pytest.raises(CorruptError, match="one of its buckets, is missing"):
        read(DENSE, Topology(2, 1), Run(bucket_size=500), without="bucket_idx_1")
    with pytest.raises(CorruptError, match="has the states"):
        read(DENSE, Topology(2, 1), Run(bucket_size=500), without="bucket_idx_1.exp_avg_sq")
    with pytest.raises(CorruptError, match="has no master weights"):
        read(DENSE, Topology(2, 1), Run(), without="bucket_idx_0.param")


def test_elements_that_no_chunk_holds_are_missing() -> None:
    store, catalog, plain = bucketed(DENSE, Topology(1, 1), Run())
    hollow = replace(
        catalog,
        tensors={
            key: replace(tensor, tiling=lambda t=tensor: t.fragments()[1:])
            if key.endswith(".exp_avg")
            else tensor
            for key, tensor in catalog.tensors.items()
        },
    )
    with pytest.raises(CorruptError, match="no file contains elements"):
        read_buckets(hollow, plain, parse_facts(catalog.args), RULES, store=store)


def test_weights_of_another_step_are_refused_with_the_place() -> None:
    store, catalog, plain = bucketed(DENSE, Topology(1, 1), Run())
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    store.contents[name] = bytearray(len(store.contents[name]))
    with pytest.raises(
        UnsupportedError,
        match=r"master weights of decoder.layers.1.mlp.linear_fc2.weight should be elements",
    ):
        read_buckets(catalog, plain, parse_facts(catalog.args), RULES, store=store)


def test_late_bound_chunks_are_cut_at_any_element(golden: Path) -> None:
    family, case = GOLD[0]
    store, catalog = dist_files(golden, family, "dense_gqa", case)
    assert isinstance(store, LocalStore)
    model = unshard(catalog, rules=RULES, optim="drop")
    unsharded = read_buckets(catalog, model, parse_facts(catalog.args), RULES, store=None)
    arrays = [
        fragment.array for tensor in unsharded.tensors.values() for fragment in tensor.fragments()
    ]
    assert all(array is not None and array.extent.is_late for array in arrays)
