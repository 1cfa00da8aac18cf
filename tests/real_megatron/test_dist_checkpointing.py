"""megatron-core saves and loads through ``core.dist_checkpointing``, and its own code agrees with
every byte of it.

One worker's megatron-core has this project in the place of its ``dist_checkpointing``
(``as_megatron``), the other is as it is. What one saves the other loads at another
layout: weights, masters, moments and the losses of the next steps are compared as for resharding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.real_megatron.megatron import Form, Megatron
from tests.real_megatron.resharding import MORE, assert_same
from tests.real_megatron.setting import Layout, Model, Optimizer, Run

ONE, TP2, PP2, DP2, EP2 = Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(ep=2, dp=2)
TP2PP2, VPP2, TP2DP2, DP4 = (
    Layout(tp=2, pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, dp=2),
    Layout(dp=4),
)
PP2EP2 = Layout(pp=2, ep=2, dp=2)

DENSE = Model()
TIED = Model(is_tied=True, vocab=60, divisible_by=8)
GELU = Model(
    is_tied=True,
    is_gated=False,
    has_bias=True,
    normalization="LayerNorm",
    position="learned_absolute",
)
PADDED = Model(vocab=50, divisible_by=16)
MOE = Model(experts=4)
MOE_SHARED = Model(experts=4, first_dense=1, shared_ffn=16, expert_bias=True, qk_layernorm=True)
MTP = Model(mtp=1)
WIDE = Model(hidden=128, ffn=64)
WIDE_MOE = Model(hidden=128, ffn=64, experts=4)
UNGATED, UNGATED_MOE = replace(WIDE, is_gated=False), replace(WIDE_MOE, is_gated=False)

FP32, FLOAT16, FLOAT16_TORCH = Optimizer(kind="fp32"), Optimizer(), Optimizer(adam="torch")
ONE_BUCKET = Optimizer(kind="distributed")
BUCKETS = Optimizer(kind="distributed", overlap=True, bucket_size=40_000)

PLAIN, PARALLEL = Form("torch_dist"), Form("torch_dist", way="parallel")
ASYNC, PERSISTENT = Form("torch_dist", way="async"), Form("torch_dist", way="persistent")
BY_PARAMETER = Form("torch_dist", "fully_reshardable")
BY_RANGE = Form("torch_dist", "fully_sharded_model_space")
BY_BUCKET = Form("torch_dist", "dp_reshardable")
BY_FIRST = Form("torch_dist", "dp_zero_gather_scatter")

Case = tuple[Model, Optimizer, Layout, Layout, Form]

SHORT: dict[str, Case] = {
    "tied_tp2_to_pp2": (TIED, FLOAT16, TP2, PP2, PARALLEL),
    "wide_dp2_to_tp2_by_parameters": (
        WIDE,
        ONE_BUCKET,
        DP2,
        TP2,
        replace(BY_PARAMETER, way="async"),
    ),
}
"""In every run of the tests."""

LONG: dict[str, Case] = {
    "dense_fp32_tp2_to_pp2": (DENSE, FP32, TP2, PP2, PLAIN),
    "dense_torch_tp1_to_tp2": (DENSE, FLOAT16_TORCH, ONE, TP2, PLAIN),
    "dense_vpp2_to_tp2": (DENSE, FLOAT16, VPP2, TP2, PLAIN),
    "dense_tp2_to_vpp2": (DENSE, FLOAT16, TP2, VPP2, ASYNC),
    "dense_dp4_to_tp2pp2": (DENSE, FLOAT16, DP4, TP2PP2, PERSISTENT),
    "dense_tp2dp2_to_dp2": (DENSE, FLOAT16, TP2DP2, DP2, PARALLEL),
    "padded_tp1_to_tp2": (PADDED, FLOAT16, ONE, TP2, PLAIN),
    "padded_tp2_to_tp1": (PADDED, FLOAT16, TP2, ONE, PLAIN),
    "gelu_tp2pp2_to_one": (GELU, FLOAT16, TP2PP2, ONE, PARALLEL),
    "gelu_one_to_tp2pp2": (GELU, FLOAT16, ONE, TP2PP2, PLAIN),
    "moe_one_to_tp2": (MOE, FLOAT16, ONE, TP2, PARALLEL),
    "moe_ep2_to_pp2ep2": (MOE, FLOAT16, EP2, PP2EP2, PARALLEL),
    "moe_shared_pp2ep2_to_ep2": (MOE_SHARED, FLOAT16, PP2EP2, EP2, ASYNC),
    "moe_shared_pp2_to_one": (MOE_SHARED, FLOAT16, PP2, ONE, PLAIN),
    "mtp_pp2_to_tp2": (MTP, FLOAT16, PP2, TP2, PLAIN),
}
"""The Float16 and FP32 optimizers, which are cut as their parameters.

Between EP 1 and more megatron-core 0.16.1 loads no optimizer, whoever saved it: the experts have
one of their own then.
"""

SHARDED: dict[str, tuple[Model, Optimizer, Layout, Layout]] = {
    "dp2_to_tp2": (WIDE, ONE_BUCKET, DP2, TP2),
    "buckets_dp4_to_tp2pp2": (WIDE, BUCKETS, DP4, TP2PP2),
    "buckets_tp2_to_dp2": (WIDE, BUCKETS, TP2, DP2),
    "buckets_vpp2_to_one": (WIDE, BUCKETS, VPP2, ONE),
    "buckets_moe_ep2_to_pp2ep2": (WIDE_MOE, BUCKETS, EP2, PP2EP2),
}
"""The distributed optimizer."""

SAME_MODEL_PARALLEL: dict[str, tuple[Model, Optimizer, Layout, Layout]] = {
    "dp2_to_dp4": (WIDE, ONE_BUCKET, DP2, DP4),
    "buckets_dp2_to_one": (WIDE, BUCKETS, DP2, ONE),
    "buckets_tp2dp2_to_tp2": (WIDE, BUCKETS, TP2DP2, TP2),
    "buckets_moe_ep2_to_ep2": (WIDE_MOE, BUCKETS, EP2, EP2),
}
"""What the buckets of the distributed optimizer, or the first data parallel rank, can be loaded
at.
"""


def _check(saver: Megatron, loader: Megatron, folder: Path, case: Case, *, load_way: str) -> None:
    model, optimizer, source, target, form = case
    run = Run(model=model, optimizer=optimizer, layout=source)
    wanted = saver.save(run, [(form, folder / "saved")], out=folder / "source", more=MORE)
    loaded = loader.load(
        run.at(target),
        replace(form, way=load_way),
        folder / "saved",
        out=folder / "target",
        more=MORE,
    )
    assert_same(run, target, wanted, loaded)


@pytest.fixture(params=["ours_to_theirs", "theirs_to_ours"])
def pair(
    request: pytest.FixtureRequest, worker: Megatron, our_worker: Megatron
) -> tuple[Megatron, Megatron]:
    """Who saves, and who loads."""
    return (our_worker, worker) if request.param == "ours_to_theirs" else (worker, our_worker)


@pytest.mark.each_value
@pytest.mark.parametrize("name", SHORT)
def test_training_goes_on_from_what_the_other_saved(
    pair: tuple[Megatron, Megatron], tmp_path: Path, name: str
) -> None:
    _check(*pair, tmp_path, SHORT[name], load_way="parallel")


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("load_way", ["plain", "parallel"])
def test_training_goes_on_from_what_the_other_saved_at_every_layout(
    pair: tuple[Megatron, Megatron], tmp_path: Path, name: str, load_way: str
) -> None:
    _check(*pair, tmp_path, LONG[name], load_way=load_way)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHARDED, *SAME_MODEL_PARALLEL])
@pytest.mark.parametrize("way", ["plain", "parallel", "async"])
def test_the_distributed_optimizer_goes_on_from_what_the_other_saved(
    pair: tuple[Megatron, Megatron], tmp_path: Path, name: str, way: str
) -> None:
    case = (*{**SHARDED, **SAME_MODEL_PARALLEL}[name], replace(BY_PARAMETER, way=way))
    _check(*pair, tmp_path, case, load_way="plain" if way == "plain" else "parallel")


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHARDED, *SAME_MODEL_PARALLEL])
@pytest.mark.parametrize("way", ["plain", "parallel", "async"])
def test_the_distributed_optimizer_goes_on_from_flat_ranges(
    our_worker: Megatron, tmp_path: Path, name: str, way: str
) -> None:
    """megatron-core 0.16.1 makes them, but refuses them itself, and its factories of gates no
    longer cut them.
    """
    model, *rest = {**SHARDED, **SAME_MODEL_PARALLEL}[name]
    case = (UNGATED if model is WIDE else UNGATED_MOE, *rest, replace(BY_RANGE, way=way))
    _check(
        our_worker, our_worker, tmp_path, case, load_way="plain" if way == "plain" else "parallel"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", SAME_MODEL_PARALLEL)
@pytest.mark.parametrize("way", ["plain", "parallel"])
@pytest.mark.parametrize("form", [BY_BUCKET, BY_FIRST], ids=["by_bucket", "by_first_rank"])
def test_buckets_go_on_from_what_the_other_saved(
    pair: tuple[Megatron, Megatron], tmp_path: Path, name: str, way: str, form: Form
) -> None:
    _check(*pair, tmp_path, (*SAME_MODEL_PARALLEL[name], replace(form, way=way)), load_way=way)
