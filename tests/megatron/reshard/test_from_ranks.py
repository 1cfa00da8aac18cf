"""core.megatron.reshard.unshard.unshard on what Megatron wrote, against what it recorded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from core.arrays.box import Box, full_box
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.mapping_attributes import ATTRIBUTES
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.topology import Topology
from core.megatron.reshard.unshard import unshard
from core.verbs.convert.run import Job, run
from tests.megatron.support.megatron_gold import (
    DENSE,
    EXPERTS,
    GROUPED,
    RULES,
    VIRTUAL,
    VOCAB,
    dist_files,
    fused,
    global_form,
    mapping,
    oracle,
    rank_files,
    topology,
)
from tests.support.edited import edit_rank
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes
from tests.support.rank_files import rank_dirs

CASES = [(model, case) for model, cases in (DENSE | EXPERTS).items() for case in cases]
CASES += [("dense_gqa", case) for case in VIRTUAL]
WITH_OPTIMIZER = (
    "tp1_pp1_optim",
    "tp2_pp2_optim",
    "tp4_pp1_optim",
    "tp1_pp1_dp2_distopt",
    "tp2_pp1_dp2_distopt",
)
DIST = [
    ("mcore_torch_dist", "dense_gqa", "tp1_pp1"),
    ("mcore_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore_torch_dist", "dense_gqa", "tp2_pp2_vpp2"),
    ("mcore_torch_dist", "dense_gqa", "tp4_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp1_pp1"),
    ("mcore_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore0161_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore0161_torch_dist", "dense_gqa", "tp2_pp2_vpp2"),
    ("mcore0161_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore0121_torch_dist", "dense_gqa", "tp2_pp2"),
    ("mcore0121_torch_dist", "dense_gelu", "tp2_pp2"),
    ("mcore_torch_dist", "moe_seq", "tp1_pp1"),
    ("mcore_torch_dist", "moe_seq", "tp2_pp2_ep2"),
    ("mcore0121_torch_dist", "moe_seq", "tp2_pp2_ep2"),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "case"), CASES)
def test_every_piece_lies_where_megatron_recorded_it(golden: Path, model: str, case: str) -> None:
    _, catalog = global_form(golden, model, case, keep_padded_vocab=True)
    pieces = set()
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            assert fragment.array is not None
            pieces.add((fragment.array.name, fused(key), fragment.box, catalog.tensors[key].shape))
    expected = set()
    for row in mapping(golden, f"{model}__{case}"):
        chunk = f"model{row['chunk']}" if "vpp" in case else "model"
        expected.add(
            (
                f"{row['dir']}:{chunk}.{row['state_dict_key']}",
                row["canonical"],
                Box(tuple(row["global_offset"]), tuple(row["local_shape"])),  # type: ignore[arg-type]
                tuple(row["global_shape"]),  # type: ignore[arg-type]
            )
        )
    assert pieces == _joined(expected)


def _joined(
    expected: set[tuple[str, str, Box, tuple[int, ...]]],
) -> set[tuple[str, str, Box, tuple[int, ...]]]:
    """The same with the parts of a tensor (gate and up, say) as one piece where one rank holds all
    of them.
    """
    n_held: dict[tuple[str, str], int] = {}
    for array, key, box, _ in expected:
        n_held[array, key] = n_held.get((array, key), 0) + box.n_elements
    return {
        (array, key, full_box(shape) if n_held[array, key] == prod(shape) else box, shape)
        for array, key, box, shape in expected
    }


@pytest.mark.parametrize(("model", "case"), CASES)
def test_the_global_tensors_are_the_true_ones(golden: Path, model: str, case: str) -> None:
    store, catalog = global_form(golden, model, case)
    true = oracle(golden, model)
    assert {fused(key) for key in catalog.tensors} == set(true)
    for key in catalog.tensors:
        found_bytes = tensor_bytes(catalog, store, key)
        assert found_bytes.shape == true[fused(key)].shape
        assert (found_bytes == true[fused(key)]).all(), key


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "model", "case"), DIST)
def test_stacked_keys_give_the_same_global_tensors(
    golden: Path, family: str, model: str, case: str
) -> None:
    store, catalog = dist_files(golden, family, model, case)
    unsharded = unshard(catalog, rules=RULES)
    _, from_ranks = global_form(golden, model, "tp1_pp1")
    assert list(unsharded.tensors) == list(from_ranks.tensors)
    assert {key for key in unsharded.objects if key.endswith("_extra_state")} == {
        key
        for key in from_ranks.objects
        if key.endswith("_extra_state") and not key.startswith("output_layer")
    }
    true = oracle(golden, model)
    for key in unsharded.tensors:
        assert (tensor_bytes(unsharded, store, key) == true[fused(key)]).all(), key


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("dense_gqa", "tp4_pp1"),
        ("dense_gelu", "tp2_pp2"),
        *((name, c) for name in EXPERTS for c in EXPERTS[name]),
    ],
)
def test_order_and_facts_are_kept(golden: Path, model: str, case: str) -> None:
    _, catalog = global_form(golden, model, case)
    _, single = global_form(golden, model, "tp1_pp1")
    assert list(catalog.tensors) == list(single.tensors)
    assert facet_of(catalog, MegatronModel).order == facet_of(single, MegatronModel).order
    assert catalog.iteration == 10
    assert catalog.facet(Topology) == topology(case)
    assert facet_of(catalog, MegatronModel).vocab_size == VOCAB[model]
    assert set(catalog.common or {}) == {
        "args",
        "checkpoint_version",
        "iteration",
        "num_floating_point_operations_so_far",
    }


def test_replicas_are_fragments_with_one_box(golden: Path) -> None:
    _, catalog = global_form(golden, "dense_gelu", "tp2_pp2")
    assert len(catalog.fragments("decoder.layers.3.input_layernorm.weight")) == 2
    assert [fragment.box for fragment in catalog.fragments("decoder.final_layernorm.bias")] == [
        Box((0,), (32,))
    ] * 2


def test_a_tied_output_layer_is_a_replica_of_the_embedding(golden: Path) -> None:
    _, catalog = global_form(golden, "dense_gelu", "tp2_pp2")
    assert "output_layer.weight" not in catalog.tensors
    names = [
        fragment.array.name
        for fragment in catalog.fragments("embedding.word_embeddings.weight")
        if fragment.array
    ]
    assert names == [
        "mp_rank_00_000:model.embedding.word_embeddings.weight",
        "mp_rank_01_000:model.embedding.word_embeddings.weight",
        "mp_rank_00_001:model.output_layer.weight",
        "mp_rank_01_001:model.output_layer.weight",
    ]


def test_padding_is_cut_with_a_note_or_kept_for_a_destination_that_needs_as_much(
    golden: Path,
) -> None:
    key = "embedding.word_embeddings.weight"
    _, cut = global_form(golden, "dense_gqa", "tp4_pp1")
    assert cut.tensors[key].shape == (300, 64)
    assert any("512 → 300 rows (vocabulary 300, padding removed)" in note for note in cut.notes)
    assert [fragment.box.offset[0] for fragment in cut.fragments(key)] == [0, 128, 256]
    _, padded = global_form(golden, "dense_gqa", "tp4_pp1", target_tp=4)
    assert padded.tensors[key].shape == (512, 64)
    _, other = global_form(golden, "dense_gqa", "tp4_pp1", target_tp=2)
    assert other.tensors[key].shape == (300, 64)


def test_a_vocabulary_that_does_not_fit_is_refused(golden: Path) -> None:
    _, catalog = rank_files(golden, "dense_gqa", "tp2_pp1")
    with pytest.raises(
        UsageError, match="a vocabulary of 500 tokens does not fit in the 384 stored rows"
    ):
        unshard(catalog, rules=RULES, vocab_size=500)
    with pytest.raises(UsageError, match="cannot be combined"):
        unshard(catalog, rules=RULES, vocab_size=300, keep_padded_vocab=True)


@pytest.mark.parametrize("files", [rank_files, dist_files])
def test_what_was_dropped_before_stays_on_record(golden: Path, files: Any) -> None:
    family = ("mcore_torch_dist",) if files is dist_files else ()
    _, catalog = files(golden, *family, "dense_gqa", "tp2_pp2")
    earlier = Dropped(("run_config.yaml",), "read")
    result = unshard(replace(catalog, dropped=(earlier,)), rules=RULES, optim="drop")
    assert result.dropped[0] == earlier


@pytest.mark.parametrize("to", ["megatron", "torch_dist", "torch"])
def test_attributes_of_state_dicts_are_listed(golden: Path, tmp_path: Path, to: str) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "src")
    for number, path in enumerate(rank_dirs(tmp_path / "src").values()):

        def change(loaded: dict[str, Any], number: int = number) -> None:
            setattr(loaded["model"], f"ema{number}", torch.ones(2))
            loaded["model"]._metadata = {"decoder": {"version": 1}}

        edit_rank(path, change)
    report = run(Job(src=tmp_path / "src", dst=tmp_path / "dst", to=to, fsync=False))
    assert f"{ATTRIBUTES}: model.ema0, model.ema1" in report.dropped
    # Only rank files have the versions of modules.
    versions = "model._metadata (module versions, which torch recreates)"
    assert (versions in report.dropped) == (to != "megatron")


@pytest.mark.parametrize("case", WITH_OPTIMIZER)
def test_an_optimizer_is_refused_or_left_out_with_a_note(golden: Path, case: str) -> None:
    _, catalog = rank_files(golden, "dense_gqa", case)
    kind = "distributed" if "distopt" in case else "float16"
    with pytest.raises(UnsupportedError, match=rf"\({kind}\).*--no-optim"):
        unshard(catalog, rules=RULES, optim="refuse")
    unsharded = unshard(catalog, rules=RULES, optim="drop")
    listed = [str(entry) for entry in unsharded.dropped if entry.is_listed]
    assert listed == [f"optimizer ({kind}; start Megatron with --no-load-optim)"]
    assert set(unsharded.tensors) == set(global_form(golden, "dense_gqa", "tp1_pp1")[1].tensors)
    assert "opt_param_scheduler" in (unsharded.common or {})


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("mcore_torch_dist", "tp2_pp2_optim"),
        ("mcore_torch_dist", "tp2_pp1_dp2_distopt_dpreshardable"),
        ("mcore_torch_dist", "tp2_pp1_dp2_distopt_fullyreshardable"),
        ("mcore0161_torch_dist", "tp2_pp2_optim"),
        ("mcore0121_torch_dist", "tp2_pp1_dp2_distopt_fully_sharded_model_space"),
        ("mcore0121_torch_dist", "tp2_pp1_dp2_distopt_dp_zero_gather_scatter"),
    ],
)
def test_an_optimizer_in_torch_dist_is_refused_or_left_out(
    golden: Path, family: str, case: str
) -> None:
    store, catalog = dist_files(golden, family, "dense_gqa", case)
    with pytest.raises(UnsupportedError, match="optimizer state"):
        unshard(catalog, rules=RULES, optim="refuse")
    unsharded = unshard(catalog, rules=RULES, optim="drop")
    true = oracle(golden, "dense_gqa")
    assert {fused(key) for key in unsharded.tensors} == set(true)
    for key in unsharded.tensors:
        assert (tensor_bytes(unsharded, store, key) == true[fused(key)]).all(), key
    assert not any("optim" in key for key in (*unsharded.objects, *unsharded.hidden))


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_experts_are_views_of_their_parameter(golden: Path, case: str) -> None:
    store, catalog = global_form(golden, "moe_grouped", case)
    _, single = global_form(golden, "moe_seq", "tp1_pp1")
    assert facet_of(catalog, MegatronModel).expert_names == "grouped"
    assert facet_of(single, MegatronModel).expert_names == "sequential"
    assert facet_of(catalog, MegatronModel).order == facet_of(single, MegatronModel).order
    true = oracle(golden, "moe_seq")
    for key in catalog.tensors:
        assert (tensor_bytes(catalog, store, key) == true[fused(key)]).all(), key
    (first, *_) = catalog.fragments(
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    )
    assert first.array is not None
    assert first.array.name == "mp_rank_00" + ("_000" if "ep" in case else "") + (
        ":model.decoder.layers.0.mlp.experts.weight1[1]"
    )
    rows = 64 // topology(case).tp
    assert (first.array.shape, first.array.extent.strides, first.array.extent.crc) == (
        (rows, 32),
        (1, rows),
        None,
    )


def test_what_every_expert_rank_repeats_is_a_replica(golden: Path) -> None:
    _, catalog = global_form(golden, "moe_seq", "tp2_pp1_ep2_etp1")
    assert len(catalog.fragments("decoder.layers.3.mlp.router.weight")) == 2
    assert len(catalog.fragments("decoder.layers.3.self_attention.linear_qkv.weight")) == 2
    for expert, folder in ((0, "mp_rank_00_000"), (3, "mp_rank_01_001")):
        (fragment,) = catalog.fragments(
            f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc2.weight"
        )
        assert fragment.array is not None and fragment.array.name.startswith(folder + ":")


def test_one_rank_of_many_is_refused(golden: Path) -> None:
    from core.files.store import LocalStore
    from core.formats.megatron import format as megatron

    folder = golden / "mcore_legacy" / "dense_gqa" / "tp2_pp1" / "iter_0000010" / "mp_rank_01"
    for store in (LocalStore(folder), LocalStore(folder, entry="model_optim_rng.pt")):
        catalog = megatron.read(store)
        assert "mp_rank_01:model.output_layer.weight" in catalog.tensors
        with pytest.raises(UnsupportedError, match="one rank"):
            unshard(catalog, rules=RULES)


def test_arguments_that_contradict_the_shapes_are_corrupt(golden: Path) -> None:
    from core.megatron.model.args import replaced

    _, catalog = rank_files(golden, "dense_gqa", "tp2_pp1")
    for changes, message in (
        ({"num_query_groups": 2}, "need 96 rows, but the tensor has 128"),
        ({"num_layers": 5}, "should have 5 layers, but layer 4 is missing"),
        ({"num_layers": 3}, "should have 3 layers, but also has layer 3"),
        ({"vocab_size": 5000}, "does not fit"),
    ):
        wrong = replace(catalog, args=replaced(catalog.args, changes))
        with pytest.raises(CorruptError, match=message):
            unshard(wrong, rules=RULES)
