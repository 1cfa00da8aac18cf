"""Models of megatron.legacy: nested dicts of older names, and the row orders of before
checkpoint_version 2.0.

Megatron's own rank files are rewritten under old names (``old_names``); what then is resharded must
equal the rewritten files of the wanted layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UnsupportedError
from core.files.store import LocalStore
from core.formats.megatron import format as megatron
from core.megatron.model.args import replaced
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.reshard.test_matrix import sizes
from tests.megatron.support.megatron_gold import oracle
from tests.megatron.support.old_names import (
    NEW,
    OLD,
    TIED,
    UNTIED,
    assert_same_nested,
    old_order,
    rewrite,
)
from tests.support.materialize import tensor_bytes
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

RULES = load_rules()
LAYOUTS = ("tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2", "tp4_pp1")
GELU = {"new": {**NEW, **TIED}, "old": {**OLD, **TIED}}
GQA = {**NEW, **UNTIED}


def reshard(src: Path, dst: Path, case: str, to: str | None = "megatron") -> list[str]:
    # Sizes that are not given stay those of the source.
    wanted = sizes(case)
    report = run(
        Job(src=src, dst=dst, to=to, topology=TopologyChange(**wanted), optim="drop", fsync=False)
    )
    return list(report.notes)


@pytest.mark.each_value
@pytest.mark.parametrize("names", ["new", "old"])
@pytest.mark.parametrize(("a", "b"), [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b])
def test_shared_embeddings(golden: Path, tmp_path: Path, a: str, b: str, names: str) -> None:
    source = golden / "mcore_legacy" / "dense_gelu"
    rewrite(source / a, tmp_path / "a", GELU[names])
    rewrite(source / b, tmp_path / "b", GELU[names])
    reshard(tmp_path / "a", tmp_path / "out", b)
    assert_same_nested(tmp_path / "out", tmp_path / "b")


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("a", "b"),
    [("tp1_pp1", "tp2_pp2_vpp2"), ("tp1_pp2_vpp2", "tp4_pp1"), ("tp2_pp2", "tp1_pp2_vpp2")],
)
def test_an_output_layer_of_its_own_gated_mlps_and_model_chunks(
    golden: Path, tmp_path: Path, a: str, b: str
) -> None:
    source = golden / "mcore_legacy" / "dense_gqa"
    rewrite(source / a, tmp_path / "a", GQA)
    rewrite(source / b, tmp_path / "b", GQA)
    reshard(tmp_path / "a", tmp_path / "out", b)
    assert_same_nested(tmp_path / "out", tmp_path / "b")


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("a", "b"),
    [("tp1_pp1", "tp2_pp1_ep2"), ("tp1_pp2_ep2", "tp1_pp1_ep4"), ("tp2_pp1_ep2", "tp1_pp1")],
)
def test_experts_of_a_switch_mlp(golden: Path, tmp_path: Path, a: str, b: str) -> None:
    source = golden / "mcore_legacy" / "moe_seq"
    for case, name in ((a, "a"), (b, "b")):
        rewrite(source / case, tmp_path / name, GQA, more_args={"moe_layer_freq": 1})
    reshard(tmp_path / "a", tmp_path / "out", b)
    assert_same_nested(tmp_path / "out", tmp_path / "b")


@pytest.mark.each_value
@pytest.mark.parametrize("version", [0, 1.0, None])
@pytest.mark.parametrize(
    ("a", "b"), [("tp2_pp2", "tp1_pp1"), ("tp1_pp1", "tp4_pp1"), ("tp4_pp1", "tp2_pp1")]
)
def test_rows_of_an_old_version_are_put_in_order(
    golden: Path, tmp_path: Path, a: str, b: str, version: float | None
) -> None:
    source = golden / "mcore_legacy" / "dense_gelu"
    order = old_order(version or 0, heads=4 // sizes(a)["tp"], channels=8)
    rewrite(source / a, tmp_path / "a", GELU["old"], version=version, change=order)
    rewrite(source / b, tmp_path / "b", GELU["old"])
    notes = reshard(tmp_path / "a", tmp_path / "out", b)
    assert_same_nested(tmp_path / "out", tmp_path / "b")
    assert any("reordered query, key and value rows" in note for note in notes)
    for path in rank_dirs(tmp_path / "out").values():
        assert load_rank_file(path / MODEL_FILE)["checkpoint_version"] == 3.0


@pytest.mark.parametrize("version", [0, 1.0])
def test_the_global_tensors_are_the_true_ones(golden: Path, tmp_path: Path, version: float) -> None:
    order = old_order(version, heads=2, channels=8)
    rewrite(
        golden / "mcore_legacy/dense_gelu/tp2_pp2",
        tmp_path / "a",
        GELU["new"],
        version=version,
        change=order,
    )
    store = LocalStore(tmp_path / "a" / "iter_0000010")
    unsharded = unshard(megatron.read(store), rules=RULES)
    true = oracle(golden, "dense_gelu")
    assert len(unsharded.tensors) == len(true)
    for layer in range(4):
        for field in ("weight", "bias"):
            name = f"layers.{layer}.self_attention.query_key_value.{field}"
            wanted = true[f"decoder.layers.{layer}.self_attention.linear_qkv.{field}"]
            assert (
                tensor_bytes(unsharded, store, f"language_model.encoder.{name}") == wanted
            ).all()


def test_an_optimizer_follows_the_old_names(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy" / "dense_gqa"
    for case, name in (("tp2_pp2_optim", "a"), ("tp1_pp1_optim", "b")):
        rewrite(source / case, tmp_path / name, GQA, keep=("optimizer", "opt_param_scheduler"))
    run(
        Job(
            src=tmp_path / "a",
            dst=tmp_path / "out",
            topology=TopologyChange(tp=1, pp=1),
            fsync=False,
        )
    )
    assert_same_nested(tmp_path / "out", tmp_path / "b")
    assert_same_optimizer(tmp_path / "out", tmp_path / "b")


@pytest.mark.each_value
@pytest.mark.parametrize("version", [0, 1.0])
def test_an_optimizers_states_have_the_old_order_of_rows_too(
    golden: Path, tmp_path: Path, version: float
) -> None:
    source = golden / "mcore_legacy" / "dense_gelu"
    order = old_order(version, heads=2, channels=8)
    rewrite(source / "tp2_pp1", tmp_path / "a", GELU["old"], version=version, change=order)
    rewrite(source / "tp1_pp1", tmp_path / "b", GELU["old"])
    for root in (tmp_path / "a", tmp_path / "b"):
        for path in rank_dirs(root).values():
            loaded = load_rank_file(path / MODEL_FILE)
            loaded["optimizer"] = optimizer_of(list(tensors_in(loaded["model"])))
            torch.save(loaded, path / MODEL_FILE)
    run(Job(src=tmp_path / "a", dst=tmp_path / "out", topology=TopologyChange(tp=1), fsync=False))
    assert_same_nested(tmp_path / "out", tmp_path / "b")
    assert_same_optimizer(tmp_path / "out", tmp_path / "b")


def tensors_in(model: Any) -> Iterator[torch.Tensor]:
    for value in model.values():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_in(value)


def optimizer_of(weights: list[torch.Tensor]) -> dict[str, Any]:
    """A Float16 optimizer's state dict whose states tell which weight they belong to; matrices have
    weight decay.
    """
    groups = [[w for w in weights if w.dim() == 2], [w for w in weights if w.dim() != 2]]
    ordered = [weight.float() for group in groups for weight in group]
    settings = {
        "is_expert_parallel": False,
        "lr_mult": 1.0,
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "step": 1,
    }
    return {
        "optimizer": {
            "state": {
                n: {"exp_avg": master * 2, "exp_avg_sq": master**2}
                for n, master in enumerate(ordered)
            },
            "param_groups": [
                {"wd_mult": 1.0, **settings, "params": list(range(len(groups[0])))},
                {"wd_mult": 0.0, **settings, "params": list(range(len(groups[0]), len(ordered)))},
            ],
        },
        "fp32_from_fp16_params": [[weight.float() for weight in group] for group in groups],
    }


def assert_same_optimizer(found_root: Path, wanted_root: Path) -> None:
    """Every rank's optimizer has the same masters and states, by number."""
    for folder, path in rank_dirs(wanted_root).items():
        theirs = load_rank_file(path / MODEL_FILE)["optimizer"]
        ours = load_rank_file(rank_dirs(found_root)[folder] / MODEL_FILE)["optimizer"]
        assert [group["params"] for group in ours["optimizer"]["param_groups"]] == [
            group["params"] for group in theirs["optimizer"]["param_groups"]
        ]
        for master, wanted in zip(
            ours["fp32_from_fp16_params"], theirs["fp32_from_fp16_params"], strict=True
        ):
            assert [torch.equal(a, b) for a, b in zip(master, wanted, strict=True)] == [True] * len(
                wanted
            )
        for number, states in theirs["optimizer"]["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(ours["optimizer"]["state"][number][name], states[name]), (
                    number,
                    name,
                )


def test_versions_and_heads_that_make_no_sense_are_refused(golden: Path, tmp_path: Path) -> None:
    rewrite(golden / "mcore_legacy/dense_gelu/tp2_pp1", tmp_path / "a", GELU["new"], version=1.5)
    catalog = megatron.read(LocalStore(tmp_path / "a" / "iter_0000010"))
    with pytest.raises(UnsupportedError, match=r"checkpoint_version 1\.5"):
        unshard(catalog, rules=RULES)
    rewrite(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "b", GQA, version=0)
    with pytest.raises(UnsupportedError, match="with query groups"):
        unshard(megatron.read(LocalStore(tmp_path / "b" / "iter_0000010")), rules=RULES)
    rewrite(golden / "mcore_legacy/dense_gelu/tp2_pp1", tmp_path / "c", GELU["new"], version=0)
    catalog = megatron.read(LocalStore(tmp_path / "c" / "iter_0000010"))
    wrong = replace(catalog, args=replaced(catalog.args, {"kv_channels": 4}))
    with pytest.raises(CorruptError, match="16 columns .attention_inner., but it has 32"):
        unshard(wrong, rules=RULES)


def test_no_other_form_has_these_names(golden: Path, tmp_path: Path) -> None:
    rewrite(golden / "mcore_legacy/dense_gelu/tp2_pp1", tmp_path / "a", GELU["new"])
    with pytest.raises(UnsupportedError, match=r"megatron\.legacy models exist only as rank files"):
        reshard(tmp_path / "a", tmp_path / "out", "tp1_pp1", "torch_dist")
    with pytest.raises(UnsupportedError, match=r"megatron\.legacy names"):
        run(Job(src=tmp_path / "a", dst=tmp_path / "hf", to="hf", fsync=False))
    assert not (tmp_path / "hf").exists()


def test_safetensors_has_the_old_names(golden: Path, tmp_path: Path) -> None:
    rewrite(golden / "mcore_legacy/dense_gelu/tp2_pp2", tmp_path / "a", GELU["new"])
    run(Job(src=tmp_path / "a", dst=tmp_path / "safe", to="safetensors", fsync=False))
    from core.opening.open import open_checkpoint

    opened = open_checkpoint(tmp_path / "safe")
    assert "language_model.encoder.layers.3.mlp.dense_h_to_4h.weight" in opened.catalog.tensors
    opened.store.close()


def test_arguments_of_before_pipelines_are_refused_by_name(golden: Path, tmp_path: Path) -> None:
    rewrite(golden / "mcore_legacy/dense_gelu/tp2_pp1", tmp_path / "a", GELU["old"])
    for path in rank_dirs(tmp_path / "a").values():
        loaded = load_rank_file(path / MODEL_FILE)
        fields = vars(loaded["args"])
        fields["model_parallel_size"] = fields.pop("tensor_model_parallel_size")
        torch.save(loaded, path / MODEL_FILE)
    with pytest.raises(UnsupportedError, match="no tensor_model_parallel_size"):
        megatron.read(LocalStore(tmp_path / "a" / "iter_0000010"))


@pytest.mark.parametrize(
    "name", ["pipeline_model_parallel_split_rank", "encoder_pipeline_model_parallel_size"]
)
def test_pipelines_of_encoders_and_decoders_are_refused_by_name(
    golden: Path, tmp_path: Path, name: str
) -> None:
    rewrite(
        golden / "mcore_legacy/dense_gelu/tp1_pp2", tmp_path / "a", GELU["new"], more_args={name: 1}
    )
    catalog = megatron.read(LocalStore(tmp_path / "a" / "iter_0000010"))
    with pytest.raises(UnsupportedError, match=f"encoder-decoder pipelines.*{name}"):
        unshard(catalog, rules=RULES)
