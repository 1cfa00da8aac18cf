"""Training goes on in real megatron-core at another layout, from what this project made of its
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_megatron.megatron import Form, Megatron
from tests.real_megatron.resharding import prove
from tests.real_megatron.setting import Layout, Model, Optimizer, Run

ONE, TP2, PP2, DP2, EP2 = Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(ep=2, dp=2)
VPP2 = Layout(pp=2, vpp=2)

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
GROUPED = Model(experts=4, grouped=True)
MOE_SHARED = Model(experts=4, first_dense=1, shared_ffn=16, expert_bias=True, qk_layernorm=True)
FIVE = Model(layers=5)
MTP = Model(mtp=1)

FP32, FLOAT16 = Optimizer(kind="fp32"), Optimizer()
FP32_TORCH, FLOAT16_TORCH = Optimizer(kind="fp32", adam="torch"), Optimizer(adam="torch")
ONE_BUCKET = Optimizer(kind="distributed")
BUCKETS = Optimizer(kind="distributed", overlap=True, bucket_size=3000)

RANK_FILES, GLOBAL = Form(), Form("torch_dist")
BY_PARAMETER, BY_BUCKET = (
    Form("torch_dist", "fully_reshardable"),
    Form("torch_dist", "dp_reshardable"),
)

Case = tuple[Model, Optimizer, Layout, Layout]

SHORT: dict[str, Case] = {
    "dense_tp2_to_pp2": (DENSE, FLOAT16, TP2, PP2),
    "moe_ep1_to_ep2": (MOE, FLOAT16, ONE, EP2),
    "tied_pp1_to_pp2": (TIED, FLOAT16, ONE, PP2),
}
"""Rank files to rank files, in every run of the tests."""

LONG: dict[str, Case] = {
    "dense_fp32_tp2_to_pp2": (DENSE, FP32, TP2, PP2),
    "dense_torch_tp2_to_pp2": (DENSE, FLOAT16_TORCH, TP2, PP2),
    "tied_fp32_torch_pp1_to_pp2": (TIED, FP32_TORCH, ONE, PP2),
    "moe_torch_ep1_to_ep2": (MOE, FLOAT16_TORCH, ONE, EP2),
    "dense_fp32_tp1_to_tp2": (DENSE, FP32, ONE, TP2),
    "dense_tp1_to_tp2": (DENSE, FLOAT16, ONE, TP2),
    "dense_vpp2_to_tp2": (DENSE, FLOAT16, VPP2, TP2),
    "dense_tp2_to_vpp2": (DENSE, FLOAT16, TP2, VPP2),
    "dense_tp4_to_tp2pp2": (DENSE, FLOAT16, Layout(tp=4), Layout(tp=2, pp=2)),
    "padded_tp1_to_tp2": (PADDED, FLOAT16, ONE, TP2),
    "padded_tp2_to_tp1": (PADDED, FLOAT16, TP2, ONE),
    "gelu_tp2pp2_to_one": (GELU, FLOAT16, Layout(tp=2, pp=2), ONE),
    "gelu_one_to_tp2pp2": (GELU, FLOAT16, ONE, Layout(tp=2, pp=2)),
    "tied_pp2_to_pp1": (TIED, FLOAT16, PP2, ONE),
    "tied_fp32_pp1_to_pp2": (TIED, FP32, ONE, PP2),
    "tied_pp2_to_tp2": (TIED, FLOAT16, PP2, TP2),
    "moe_ep2_to_ep1": (MOE, FLOAT16, EP2, ONE),
    "moe_fp32_ep2_to_pp2": (MOE, FP32, EP2, PP2),
    "moe_ep2_to_pp2ep2": (MOE, FLOAT16, EP2, Layout(pp=2, ep=2, dp=2)),
    "moe_shared_ep1_to_ep2": (MOE_SHARED, FLOAT16, ONE, EP2),
    "moe_shared_pp2_to_ep2": (MOE_SHARED, FLOAT16, PP2, EP2),
    "uneven_pp3_to_one": (FIVE, FLOAT16, Layout(pp=3, first=1, last=2), ONE),
    "uneven_one_to_pp3": (FIVE, FLOAT16, ONE, Layout(pp=3, first=1, last=2)),
    "uneven_pp2_to_pp3": (FIVE, FLOAT16, Layout(pp=2, first=2), Layout(pp=3, last=1)),
    "string_to_pp2": (DENSE, FLOAT16, Layout(pp=2, vpp=2, string="Et|t|tt|L"), PP2),
    "pp2_to_string": (DENSE, FLOAT16, PP2, Layout(pp=3, string="E|ttt|tL")),
    "counted_to_one": (FIVE, FLOAT16, Layout(pp=2, counts_embedding=True), ONE),
    "mtp_one_to_pp2": (MTP, FLOAT16, ONE, PP2),
    "mtp_pp2_to_tp2": (MTP, FLOAT16, PP2, TP2),
}
"""The rest of the matrix."""

WIDE = Model(hidden=128, ffn=64)
WIDE_TIED = Model(hidden=128, ffn=64, is_tied=True, vocab=60, divisible_by=8)
WIDE_MOE = Model(hidden=128, ffn=64, experts=4)
WIDE_BUCKETS = Optimizer(kind="distributed", overlap=True, bucket_size=40_000)

GAPS: dict[str, Case] = {
    "buckets_dp2_to_tp2": (DENSE, BUCKETS, DP2, TP2),
    "buckets_tp2_to_pp2": (DENSE, BUCKETS, TP2, PP2),
    "buckets_tied_pp2_to_one": (TIED, BUCKETS, PP2, ONE),
    "buckets_moe_ep2_to_one": (MOE, BUCKETS, EP2, ONE),
}
"""``distrib_optim.pt`` whose parameters do not follow each other without gaps."""

FLAT: dict[str, Case] = {
    "dp2_to_tp2": (WIDE, ONE_BUCKET, DP2, TP2),
    "buckets_dp2_to_tp2": (WIDE, WIDE_BUCKETS, DP2, TP2),
    "buckets_tp2_to_pp2": (WIDE, WIDE_BUCKETS, TP2, PP2),
    "buckets_pp2_to_dp2": (WIDE, WIDE_BUCKETS, PP2, DP2),
    "buckets_vpp2_to_one": (WIDE, WIDE_BUCKETS, VPP2, ONE),
    "buckets_tied_pp2_to_one": (WIDE_TIED, WIDE_BUCKETS, PP2, ONE),
    "buckets_tied_one_to_pp2": (WIDE_TIED, WIDE_BUCKETS, ONE, PP2),
    "buckets_moe_ep2_to_one": (WIDE_MOE, WIDE_BUCKETS, EP2, ONE),
    "buckets_moe_one_to_ep2": (WIDE_MOE, WIDE_BUCKETS, ONE, EP2),
}
"""The distributed optimizer: ``distrib_optim.pt`` beside rank files, and its two forms in
torch_dist.
"""


def _check(
    worker: Megatron,
    case: Case,
    folder: Path,
    source_form: Form,
    target_form: Form,
    *,
    optim: bool = True,
) -> None:
    model, optimizer, source, target = case
    run = Run(model=model, optimizer=optimizer, layout=source)
    prove(
        worker, run, target, folder, source_form=source_form, target_form=target_form, optim=optim
    )


@pytest.mark.parametrize("name", ["dense_tp2_to_pp2"])
def test_weights_alone_give_the_same_loss(worker: Megatron, tmp_path: Path, name: str) -> None:
    _check(worker, SHORT[name], tmp_path, RANK_FILES, RANK_FILES, optim=False)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHORT, *LONG])
@pytest.mark.parametrize("source_form", [RANK_FILES, GLOBAL], ids=["rank_files", "torch_dist"])
@pytest.mark.parametrize(
    "target_form", [RANK_FILES, GLOBAL], ids=["to_rank_files", "to_torch_dist"]
)
def test_weights_of_every_form_give_the_same_loss(
    worker: Megatron, tmp_path: Path, name: str, source_form: Form, target_form: Form
) -> None:
    _check(worker, {**SHORT, **LONG}[name], tmp_path, source_form, target_form, optim=False)


@pytest.mark.parametrize("name", SHORT)
def test_training_goes_on_from_resharded_rank_files(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    _check(worker, SHORT[name], tmp_path, RANK_FILES, RANK_FILES)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_training_goes_on_from_rank_files_of_every_layout(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    _check(worker, LONG[name], tmp_path, RANK_FILES, RANK_FILES)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_training_goes_on_from_torch_dist_made_of_rank_files(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    _check(worker, {**SHORT, **LONG}[name], tmp_path, RANK_FILES, GLOBAL)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_training_goes_on_from_rank_files_made_of_torch_dist(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    _check(worker, {**SHORT, **LONG}[name], tmp_path, GLOBAL, RANK_FILES)


KINDS: dict[str, tuple[Model, Form, Form, str | None]] = {
    "to_grouped": (MOE, RANK_FILES, RANK_FILES, "grouped"),
    "to_sequential": (GROUPED, RANK_FILES, RANK_FILES, "sequential"),
    "grouped_stays": (GROUPED, RANK_FILES, RANK_FILES, None),
    "grouped_stays_in_torch_dist": (GROUPED, RANK_FILES, GLOBAL, None),
    "grouped_out_of_torch_dist": (GROUPED, GLOBAL, RANK_FILES, None),
    "to_grouped_in_torch_dist": (MOE, RANK_FILES, GLOBAL, "grouped"),
    "torch_dist_to_sequential": (GROUPED, GLOBAL, GLOBAL, "sequential"),
}
"""Experts before, forms, and kind of experts that training goes on with."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if n < 2 else pytest.mark.long) for n, name in enumerate(KINDS)],
)
def test_training_goes_on_with_another_kind_of_experts(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    model, source_form, target_form, experts = KINDS[name]
    prove(
        worker,
        Run(model=model, optimizer=FLOAT16, layout=ONE),
        EP2,
        tmp_path,
        source_form=source_form,
        target_form=target_form,
        experts=experts,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", GAPS)
def test_training_goes_on_from_buckets_with_gaps(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    _check(worker, GAPS[name], tmp_path, RANK_FILES, RANK_FILES)


FROZEN = Model(hidden=128, ffn=64, frozen="embedding|linear_qkv|mlp.linear_fc2|final")
FROZEN_CASES: dict[str, tuple[Optimizer, Layout, Layout, Form, Form]] = {
    "distributed_tp2_to_pp2": (ONE_BUCKET, TP2, PP2, RANK_FILES, RANK_FILES),
    "distributed_pp2_to_dp2": (ONE_BUCKET, PP2, DP2, RANK_FILES, RANK_FILES),
    "buckets_dp2_to_tp2": (WIDE_BUCKETS, DP2, TP2, RANK_FILES, RANK_FILES),
    "float16_tp2_to_pp2": (FLOAT16, TP2, PP2, RANK_FILES, RANK_FILES),
    "params_tp2_to_pp2": (ONE_BUCKET, TP2, PP2, BY_PARAMETER, BY_PARAMETER),
    "params_pp2_to_rank_files_dp2": (ONE_BUCKET, PP2, DP2, BY_PARAMETER, RANK_FILES),
    "rank_files_tp2_to_params_pp2": (ONE_BUCKET, TP2, PP2, RANK_FILES, BY_PARAMETER),
    "in_buckets_tp2_to_params_pp2": (ONE_BUCKET, TP2, PP2, BY_BUCKET, BY_PARAMETER),
    "in_buckets_dp2_to_rank_files_tp2": (WIDE_BUCKETS, DP2, TP2, BY_BUCKET, RANK_FILES),
    "float16_global_tp2_to_pp2": (FLOAT16, TP2, PP2, GLOBAL, GLOBAL),
}
"""Parameters that are not trained have no optimizer states."""


@pytest.mark.long
@pytest.mark.parametrize("name", FROZEN_CASES)
def test_training_goes_on_where_not_all_parameters_are_trained(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    *case, source_form, target_form = FROZEN_CASES[name]
    _check(worker, (FROZEN, *case), tmp_path, source_form, target_form)


@pytest.mark.long
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize(
    "source_form", [RANK_FILES, BY_PARAMETER, BY_BUCKET], ids=["rank_files", "params", "buckets"]
)
@pytest.mark.parametrize(
    "target_form", [RANK_FILES, BY_PARAMETER], ids=["to_rank_files", "to_params"]
)
def test_training_goes_on_with_the_distributed_optimizer(
    worker: Megatron, tmp_path: Path, name: str, source_form: Form, target_form: Form
) -> None:
    _check(worker, FLAT[name], tmp_path, source_form, target_form)


def test_training_goes_on_with_the_distributed_optimizer_by_parameters(
    worker: Megatron, tmp_path: Path
) -> None:
    _check(worker, FLAT["buckets_tp2_to_pp2"], tmp_path, BY_BUCKET, BY_PARAMETER)


MUON, MUON_TORCH = Optimizer(name="muon"), Optimizer(name="muon", adam="torch")
MUON_FP32, LAYER_WISE = Optimizer(name="muon", kind="fp32"), Optimizer(name="dist_muon")
PP2DP2, EP2DP4, TP2EP2 = Layout(pp=2, dp=2), Layout(ep=2, dp=4), Layout(tp=2, ep=2, etp=1, dp=2)
SGD = Optimizer(name="sgd")

OTHERS: dict[str, tuple[Model, Optimizer, Layout, Layout, Form, Form]] = {
    "muon_tp2_to_pp2": (DENSE, MUON, TP2, PP2, RANK_FILES, RANK_FILES),
    "sgd_tp2_to_pp2": (DENSE, SGD, TP2, PP2, RANK_FILES, RANK_FILES),
    "muon_moe_ep1_to_ep2": (MOE, MUON, ONE, EP2, RANK_FILES, GLOBAL),
    "muon_moe_ep2_to_ep1": (MOE, MUON, EP2, ONE, GLOBAL, RANK_FILES),
    "muon_moe_ep2_to_pp2": (MOE, MUON, EP2, PP2, RANK_FILES, RANK_FILES),
    "muon_grouped_ep1_to_ep2": (GROUPED, MUON, ONE, EP2, RANK_FILES, RANK_FILES),
    "muon_tied_pp2_to_one": (TIED, MUON, PP2, ONE, RANK_FILES, GLOBAL),
    "muon_tied_one_to_pp2": (TIED, MUON_TORCH, ONE, PP2, GLOBAL, RANK_FILES),
    "muon_gelu_one_to_tp2pp2": (GELU, MUON_TORCH, ONE, Layout(tp=2, pp=2), RANK_FILES, RANK_FILES),
    "muon_fp32_one_to_pp2": (DENSE, MUON_FP32, ONE, PP2, RANK_FILES, GLOBAL),
    "muon_vpp2_to_tp2": (DENSE, MUON, VPP2, TP2, GLOBAL, GLOBAL),
    "layer_wise_dp2_to_tp2": (DENSE, LAYER_WISE, DP2, TP2, GLOBAL, GLOBAL),
    "layer_wise_ep2_to_pp2": (MOE, LAYER_WISE, EP2, PP2, GLOBAL, GLOBAL),
    "layer_wise_files_dp2_to_tp2": (DENSE, LAYER_WISE, DP2, TP2, RANK_FILES, GLOBAL),
    "layer_wise_files_pp2dp2_to_one": (TIED, LAYER_WISE, PP2DP2, ONE, RANK_FILES, GLOBAL),
    "layer_wise_files_ep2_to_pp2": (MOE, LAYER_WISE, EP2DP4, PP2, RANK_FILES, GLOBAL),
    "layer_wise_files_tp2ep2": (MOE, LAYER_WISE, TP2EP2, EP2, RANK_FILES, GLOBAL),
    "sgd_moe_ep2_to_one": (MOE, SGD, EP2, ONE, RANK_FILES, RANK_FILES),
    "sgd_fp32_tied_pp2_to_tp2": (
        TIED,
        Optimizer(name="sgd", kind="fp32"),
        PP2,
        TP2,
        RANK_FILES,
        RANK_FILES,
    ),
}
"""Muon with Adam, by DP rank or whole, and SGD with momentum; forms before and after."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if n < 2 else pytest.mark.long) for n, name in enumerate(OTHERS)],
)
def test_training_goes_on_with_an_optimizer_other_than_adam(
    worker: Megatron, tmp_path: Path, name: str
) -> None:
    *case, source_form, target_form = OTHERS[name]
    _check(worker, tuple(case), tmp_path, source_form, target_form)
