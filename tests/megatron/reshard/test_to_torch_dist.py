"""core.megatron.reshard.to_torch_dist: a torch_dist checkpoint as Megatron itself would have
written it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from core.engine.catalog.facets import TorchDistFacts
from core.errors import UsageError
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.megatron.support.megatron_gold import RULES, dist_files, filled, global_form, topology
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes

CASES = [
    ("mcore_torch_dist", "dense_gqa", "tp1_pp1"),
    ("mcore_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore_torch_dist", "dense_gqa", "tp4_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp1_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore0161_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore0161_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore0121_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore_torch_dist", "moe_seq", "tp1_pp1"),
    ("mcore_torch_dist", "moe_seq", "tp2_pp2_ep2"),
    ("mcore0121_torch_dist", "moe_seq", "tp2_pp2_ep2"),
]
ORIGINS = {"dense_gqa": ("tp1_pp2", "tp4_pp1"), "dense_gelu": ("tp1_pp2", "tp4_pp1")}
ORIGINS |= {"moe_seq": ("tp1_pp1_ep4", "tp2_pp1_ep2_etp1")}


@pytest.mark.parametrize(
    ("family", "model", "case", "origin"),
    [(*case, origin) for case in CASES for origin in ORIGINS[case[1]]],
)
def test_keys_shapes_and_chunks_are_megatrons(
    golden: Path, family: str, model: str, case: str, origin: str
) -> None:
    _, source = global_form(golden, model, origin)
    target = to_torch_dist(source, topology(case), rules=RULES).target
    _, wanted = dist_files(golden, family, model, case)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in target.tensors.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in wanted.tensors.items()
    }
    for key in target.tensors:
        assert {fragment.box for fragment in target.fragments(key)} == {
            fragment.box for fragment in wanted.fragments(key)
        }, key


@pytest.mark.parametrize(("family", "model", "case"), CASES)
def test_chunks_go_to_the_files_of_the_ranks_that_write_them(
    golden: Path, family: str, model: str, case: str
) -> None:
    _, source = global_form(golden, model, "tp1_pp1")
    target = to_torch_dist(source, topology(case), rules=RULES).target
    _, wanted = dist_files(golden, family, model, case)
    keys = list(target.tensors)
    if (
        topology(case).ep > 1 and family == "mcore_torch_dist"
    ):  # there, what data parallel ranks share is distributed
        keys = [key for key in keys if ".experts." in key]
    assert keys
    for key in keys:
        theirs = {}
        for fragment in wanted.fragments(key):
            assert fragment.array is not None
            theirs[fragment.box] = int(fragment.array.extent.file.split("_")[2])
        ours = {
            fragment.box: dict(fragment.array.coords)["file"]
            for fragment in target.fragments(key)
            if fragment.array
        }
        assert ours == theirs, key


@pytest.mark.parametrize(
    ("model", "case", "family"),
    [
        ("dense_gqa", "tp2_pp2", "mcore_torch_dist"),
        ("dense_gelu", "tp2_pp2", "mcore0161_torch_dist"),
        ("moe_seq", "tp1_pp1", "mcore_torch_dist"),
    ],
)
def test_objects_are_megatrons(golden: Path, model: str, case: str, family: str) -> None:
    _, source = global_form(golden, model, case)
    target = to_torch_dist(source, topology(case), rules=RULES).target
    _, wanted = dist_files(golden, family, model, case)
    expected = {key for key in wanted.objects if not key.startswith("rerun_state_machine_state")}
    assert set(target.objects) == expected
    assert all(
        item.value == [None] for key, item in target.objects.items() if "_extra_state" in key
    )
    common, theirs = target.common, wanted.common
    assert common is not None and theirs is not None
    assert set(theirs) - set(common) <= {"rerun_state_machine", "content_metadata"}
    assert set(common) <= set(theirs)


@pytest.mark.parametrize(
    ("model", "a", "b"),
    [
        ("dense_gqa", "tp4_pp1", "tp2_pp2"),
        ("dense_gelu", "tp1_pp2", "tp2_pp2"),
        ("moe_seq", "tp1_pp1", "tp2_pp2_ep2"),
        ("moe_seq", "tp2_pp1_ep2_etp1", "tp2_pp2_ep2"),
        ("moe_seq", "tp1_pp1_ep4", "tp1_pp1"),
        ("moe_grouped", "tp2_pp1_ep2", "tp2_pp2_ep2"),
    ],
)
def test_chunks_hold_what_megatron_saved(golden: Path, model: str, a: str, b: str) -> None:
    store, origin = global_form(golden, model, a)
    stacked = to_torch_dist(origin, topology(b), rules=RULES)
    arrays = filled(stacked.target, stacked.source, store)
    wanted_store, wanted = dist_files(
        golden, "mcore_torch_dist", model.replace("grouped", "seq"), b
    )
    assert stacked.target.tensors
    for key in stacked.target.tensors:
        values = tensor_bytes(wanted, wanted_store, key)
        for fragment in stacked.target.fragments(key):
            assert fragment.array is not None
            region = tuple(
                slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True)
            )
            assert (arrays[fragment.array.name] == values[region]).all(), fragment.array.name


def test_torch_dist_can_be_cut_anew_and_keeps_its_random_states(golden: Path) -> None:
    store, catalog = dist_files(golden, "mcore_torch_dist", "dense_gqa", "tp2_pp2")
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=4), rules=RULES)
    assert {
        fragment.box.shape
        for fragment in stacked.target.fragments("decoder.layers.mlp.linear_fc2.weight")
    } == {(1, 64, 24)}
    assert {key for key in stacked.target.objects if key.startswith("rng_state")} == {
        f"rng_state/shard_{p}.{t}_2.2" for p in range(2) for t in range(2)
    }
    fields = fields_of(stacked.target.args)
    assert fields["tensor_model_parallel_size"] == 2
    assert fields["padded_vocab_size"] == 512
    assert facet_of(stacked.target, TorchDistFacts).dialect == "common_object"
    filled(stacked.target, stacked.source, store)


def test_layers_get_keys_of_their_own_and_one_again(golden: Path, tmp_path: Path) -> None:
    src = golden / "mcore_torch_dist" / "dense_gqa" / "tp2_pp2_optim"
    run(Job(src=src, dst=tmp_path / "each", unstack_layers=(), is_reshard=True, fsync=False))
    run(
        Job(
            src=tmp_path / "each",
            dst=tmp_path / "one",
            stack_layers=True,
            is_reshard=True,
            fsync=False,
        )
    )
    each, stacked, first = (
        open_checkpoint(path) for path in (tmp_path / "each", tmp_path / "one", src)
    )
    name = "mlp.linear_fc2.weight"
    assert each.catalog.tensors[f"optimizer.state.exp_avg.decoder.layers.3.{name}"].shape == (
        64,
        96,
    )
    assert f"decoder.layers.{name}" not in each.catalog.tensors
    assert "decoder.layers.3.mlp.linear_fc2._extra_state/shard_0_1" in each.catalog.objects
    assert dict(stacked.catalog.tensors) == {
        key: first.catalog.tensors[key] for key in stacked.catalog.tensors
    }
    assert set(stacked.catalog.tensors) == set(first.catalog.tensors)
    for key in first.catalog.tensors:
        assert (
            tensor_bytes(stacked.catalog, stacked.store, key)
            == tensor_bytes(first.catalog, first.store, key)
        ).all(), key
    for checkpoint in (each, stacked, first):
        checkpoint.store.close()


def test_layers_that_differ_are_not_stacked(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stacks either all layers or none"):
        run(
            Job(
                src=golden / "mcore_legacy/moe_seq/tp1_pp1",
                dst=tmp_path / "a",
                to="torch_dist",
                unstack_layers=("x",),
            )
        )
    with pytest.raises(UsageError, match="always stacks layers along axis 0"):
        run(
            Job(
                src=golden / "mcore_legacy/moe_seq/tp1_pp1",
                dst=tmp_path / "a",
                to="torch_dist",
                stack_layers=True,
                layer_axis=1,
            )
        )
