"""The names of the other transformer implementation: other names, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.errors import UsageError
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.unshard import unshard
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.support.megatron_gold import RULES, global_form
from tests.support.materialize import tensor_bytes
from tests.support.rank_files import MODEL_FILE, assert_same_weights, load_rank_file, rank_dirs

TE = "transformer_engine"


def _run(src: Path, dst: Path, impl: str | None, **options: object) -> None:
    run(Job(src=src, dst=dst, transformer_impl=impl, is_reshard=True, fsync=False, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "case"),
    [("dense_gqa", "tp2_pp2"), ("dense_gelu", "tp4_pp1"), ("moe_seq", "tp2_pp1_ep2_etp1")],
)
def test_there_and_back_gives_the_first_files_again(
    golden: Path, tmp_path: Path, model: str, case: str
) -> None:
    first = golden / "mcore_legacy" / model / case
    _run(first, tmp_path / "te", TE)
    _run(tmp_path / "te", tmp_path / "local", "local")
    assert_same_weights(tmp_path / "local", first)
    converted = load_rank_file(next(iter(rank_dirs(tmp_path / "te").values())) / MODEL_FILE)
    original = load_rank_file(next(iter(rank_dirs(first).values())) / MODEL_FILE)
    assert converted["args"].transformer_impl == TE
    before = {name for name, value in original["model"].items() if isinstance(value, torch.Tensor)}
    after = {name for name, value in converted["model"].items() if isinstance(value, torch.Tensor)}
    norm = "pre_mlp_layernorm" if model == "moe_seq" else "mlp.linear_fc1.layer_norm"
    assert sorted(
        name for name in after if ".layers.0." in name and "norm" in name and "weight" in name
    ) == sorted(
        [
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            f"decoder.layers.0.{norm}{'_' if norm.startswith('mlp') else '.'}weight",
        ]
    )
    assert len(after) == len(before)


def test_fused_norms_stand_before_the_linear_that_they_are_fused_with(
    golden: Path, tmp_path: Path
) -> None:
    _run(golden / "mcore_legacy/dense_gqa/tp1_pp1", tmp_path / "te", TE)
    names = list(
        load_rank_file(next(iter(rank_dirs(tmp_path / "te").values())) / MODEL_FILE)["model"]
    )
    tensors = [
        name.removeprefix("decoder.layers.0.")
        for name in names
        if "layers.0." in name and "extra" not in name
    ]
    assert tensors == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]


def test_dense_models_are_the_same_torch_dist_under_both(golden: Path, tmp_path: Path) -> None:
    src = golden / "mcore_legacy/dense_gqa/tp2_pp1"
    sizes = TopologyChange(tp=1, pp=2)
    _run(src, tmp_path / "te", TE, to="torch_dist", topology=sizes)
    _run(src, tmp_path / "local", None, to="torch_dist", topology=sizes)
    te, local = open_checkpoint(tmp_path / "te"), open_checkpoint(tmp_path / "local")
    assert dict(te.catalog.tensors) == dict(local.catalog.tensors)
    for key in te.catalog.tensors:
        assert (
            tensor_bytes(te.catalog, te.store, key) == tensor_bytes(local.catalog, local.store, key)
        ).all(), key
    te.store.close()
    local.store.close()


def test_a_norm_before_experts_keeps_its_name_in_transformer_engines_torch_dist(
    golden: Path, tmp_path: Path
) -> None:
    _run(golden / "mcore_torch_dist/moe_seq/tp2_pp2_ep2", tmp_path / "te", TE)
    checkpoint = open_checkpoint(tmp_path / "te")
    assert "decoder.layers.pre_mlp_layernorm.weight" in checkpoint.catalog.tensors
    assert (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in checkpoint.catalog.tensors
    )
    back = unshard(checkpoint.catalog, rules=RULES)
    checkpoint.store.close()
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in back.tensors


def test_what_stays_is_the_same_object(golden: Path) -> None:
    _, catalog = global_form(golden, "dense_gqa", "tp1_pp1")
    assert with_implementation(catalog, "local", rules=RULES) is catalog


def test_where_it_has_no_effect_it_is_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--transformer-impl has no effect"):
        _run(golden / "mcore_legacy/dense_gqa/tp1_pp1", tmp_path / "out", TE, to="safetensors")
    with pytest.raises(UsageError, match="--transformer-impl has no effect"):
        _run(golden / "torch_dcp/fsdp2_dp2", tmp_path / "out", TE)
