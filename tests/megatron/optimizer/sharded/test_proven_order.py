"""core.megatron.optimizer.sharded.proven_order: torch_dist has the same keys for both
implementations, so the values tell in which order a run's buffers have its parameters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.engine.catalog.catalog import Catalog
from core.errors import UnsupportedError
from core.files.store import MemoryStore
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Topology
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import make_namespace
from tests.megatron.optimizer.flat.test_read import DENSE, EXPERTS, TIED, assert_states
from tests.megatron.optimizer.sharded.test_buckets import bucketed
from tests.megatron.support.flat_files import Run
from tests.megatron.support.megatron_gold import RULES
from tests.megatron.support.synthetic import Model
from tests.support.covering import covering_cases


def as_torch_dist(
    model: Model, topology: Topology, impl: str | None
) -> tuple[MemoryStore, Catalog]:
    """A run's checkpoint with buffers under torch_dist's names.

    Args:
        impl: what the arguments state, None for nothing.
    """
    store, catalog, _ = bucketed(model, topology, Run())
    fields = {**fields_of(catalog.args), "transformer_impl": impl}
    if impl is None:
        del fields["transformer_impl"]
    args = make_namespace(fields)

    def stored(key: str) -> str:
        layer = None if model.is_fused else RULES.layer_of(key)
        return key if layer is None else str(replace(layer, sub=RULES.fused(layer.sub)))

    old_of = {stored(key): key for key in catalog.tensors}
    return store, replace(
        catalog,
        tensors={key: catalog.tensors[old] for key, old in old_of.items()},
        args=args,
        common={**(catalog.common or {}), "args": args},
    )


# The local names of experts' norms in torch_dist state the implementation.
RUNS = [
    (model, topology, is_fused, stated)
    for model, topology in [
        (DENSE, Topology(2, 1)),
        (DENSE, Topology(2, 2)),
        (DENSE, Topology(1, 1)),
        (TIED, Topology(1, 2)),
        (TIED, Topology(2, 1)),
        (replace(EXPERTS, expert_names="sequential", moe=(1,)), Topology(1, 1, ep=2)),
    ]
    for is_fused in (False, True)
    for stated in (None, "local", "transformer_engine")
    if is_fused or not model.moe or stated == "local"
]


@pytest.mark.parametrize(
    ("model", "topology", "is_fused", "stated"),
    covering_cases(
        (pytest.param(*case) for case in RUNS),
        lambda model, topology, is_fused, stated: {
            "where": (id(model), str(topology)),
            "how": (is_fused, stated),
        },
    ),
)
def test_the_order_is_that_of_the_implementation_that_saved(
    model: Model, topology: Topology, is_fused: bool, stated: str | None
) -> None:
    model = replace(model, is_fused=is_fused)
    saved = "transformer_engine" if is_fused else "local"
    store, catalog = as_torch_dist(model, topology, stated)
    unsharded = unshard(catalog, rules=RULES, store=store)
    assert_states(model, store, unsharded)
    is_proven = saved != (stated or "transformer_engine")
    assert fields_of(unsharded.args).get("transformer_impl") == (saved if is_proven else stated)
    note = (
        f"assuming transformer_impl {saved}, the only value that explains the parameter order in "
        "the optimizer's buffers"
    )
    notes = [text for text in unsharded.notes if "transformer_impl" in text]
    assert notes == [note] * is_proven


@pytest.mark.parametrize("stated", [None, "local", "transformer_engine"])
def test_values_that_prove_no_order_are_refused_with_what_was_tried(stated: str | None) -> None:
    store, catalog = as_torch_dist(DENSE, Topology(1, 1), stated)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    store.contents[name] = bytearray(len(store.contents[name]))
    with pytest.raises(UnsupportedError) as caught:
        unshard(catalog, rules=RULES, store=store)
    for impl, parameter in (
        ("local", name),
        ("transformer_engine", r"decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"),
    ):
        assert f"{impl}, the master weights of {parameter} should be" in caught.value.message


def test_values_that_fit_both_orders_are_refused_unless_one_is_recorded() -> None:
    for stated in (None, "local", "transformer_engine"):
        store, catalog = as_torch_dist(DENSE, Topology(1, 1), stated)
        for file in [*store.contents]:
            if not file.endswith("scale") and ".exp_avg" not in file:
                store.contents[file] = bytes(len(store.contents[file]))
        if stated is not None:
            unsharded = unshard(catalog, rules=RULES, store=store)
            assert fields_of(unsharded.args)["transformer_impl"] == stated
            continue
        with pytest.raises(UnsupportedError, match="fit two parameter orders"):
            unshard(catalog, rules=RULES, store=store)


def test_the_stated_order_is_taken_without_values() -> None:
    _, catalog = as_torch_dist(DENSE, Topology(1, 1), None)
    unsharded = unshard(catalog, rules=RULES)
    assert "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in {
        *unsharded.tensors
    }
