"""FP32 and Float16 optimizers in rank files, read and written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsupportedError,
)
from core.megatron.model.topology import Topology
from core.megatron.model.version import parse_version
from core.megatron.reshard.unshard import unshard
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.optimizer.flat.test_read import assert_true_states
from tests.megatron.support.megatron_gold import RULES, rank_files
from tests.megatron.support.numbered_files import Style, assert_same_optimizer, change, save
from tests.megatron.support.synthetic import Model
from tests.support.rank_files import MODEL_FILE, assert_same_weights, load_rank_file, rank_dirs

GOLD = {"tp1_pp1": (1, 1), "tp2_pp1": (2, 1), "tp2_pp2": (2, 2), "tp4_pp1": (4, 1)}
DENSE = Model(vocab=37, divisible_by=5)
TIED = replace(DENSE, is_tied=True)
MOE = Model(layers=4, experts=4, moe=(1, 2, 3), shared=6)
GROUPED = replace(MOE, expert_names="te_grouped", is_fused=True)
LATE = replace(MOE, moe=(2, 3))
"""Without experts in the first layers."""


def reshard(
    source: Path, target: Path, topology: Topology, *, moe: bool = False, **options: Any
) -> Any:
    sizes: dict[str, Any] = {"tp": topology.tp, "pp": topology.pp, "vpp": topology.vpp}
    if moe:
        sizes |= {"ep": topology.ep, "etp": topology.expert_tp}
    job = Job(
        src=source,
        dst=target,
        topology=TopologyChange(**sizes),
        is_reshard=True,
        fsync=False,
        **options,
    )
    return run(job)


def refusal(source: Path, tmp_path: Path, **options: Any) -> CheckpointingException:
    with pytest.raises(CheckpointingException) as caught:
        reshard(source, tmp_path / "refused", Topology(tp=2), **options)
    assert not (tmp_path / "refused").exists()
    return caught.value


# --- Megatron's own files ------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("target", GOLD)
@pytest.mark.parametrize("source", GOLD)
def test_resharded_optimizers_equal_those_that_megatron_saved(
    golden: Path, tmp_path: Path, source: str, target: str
) -> None:
    root = golden / "mcore_legacy" / "dense_gqa"
    tp, pp = GOLD[target]
    reshard(root / f"{source}_optim", tmp_path / "out", Topology(tp=tp, pp=pp))
    assert_same_optimizer(tmp_path / "out", root / f"{target}_optim")
    assert_same_weights(tmp_path / "out", root / f"{target}_optim")


@pytest.mark.each_value
@pytest.mark.parametrize(
    "target",
    [
        "tp1_pp1",
        "tp4_pp1",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("tp2_pp1", "tp2_pp2")),
    ],
)
@pytest.mark.parametrize("family", ["mcore_torch_dist", "mcore0161_torch_dist"])
def test_optimizers_out_of_torch_dist_equal_those_that_megatron_saved(
    golden: Path, tmp_path: Path, family: str, target: str
) -> None:
    tp, pp = GOLD[target]
    reshard(
        golden / family / "dense_gqa" / "tp2_pp2_optim",
        tmp_path / "out",
        Topology(tp=tp, pp=pp),
        to="megatron",
    )
    assert_same_optimizer(
        tmp_path / "out", golden / "mcore_legacy" / "dense_gqa" / f"{target}_optim"
    )


@pytest.mark.parametrize("family", ["mcore0121_torch_dist", "mcore0121_zarr"])
def test_groups_of_older_versions_stand_as_a_stage_first_needs_them(
    golden: Path, tmp_path: Path, family: str
) -> None:
    source = golden / family / "dense_gqa" / "tp2_pp2_optim"
    report = reshard(source, tmp_path / "out", Topology(tp=2, pp=2), to="megatron")
    decays = {}
    for folder, path in rank_dirs(tmp_path / "out").items():
        groups = load_rank_file(path / MODEL_FILE)["optimizer"]["optimizer"]["param_groups"]
        decays[folder] = [group["wd_mult"] for group in groups]
    assert decays["mp_rank_00_000"] == [1.0, 0.0]
    assert decays["mp_rank_00_001"] == [0.0, 1.0]
    assert any("before 0.16" in note for note in report.notes)


@pytest.mark.long  # each of its ways is another test's
def test_there_and_back_gives_the_first_optimizer_again(golden: Path, tmp_path: Path) -> None:
    first = golden / "mcore_legacy" / "dense_gqa" / "tp2_pp2_optim"
    reshard(first, tmp_path / "a", Topology(tp=1, pp=2, vpp=2))
    reshard(tmp_path / "a", tmp_path / "b", Topology(tp=4, pp=4))
    reshard(tmp_path / "b", tmp_path / "c", Topology(tp=2, pp=2))
    assert_same_optimizer(tmp_path / "c", first)


@pytest.mark.parametrize("source", GOLD)
def test_states_are_the_true_ones(golden: Path, source: str) -> None:
    store, catalog = rank_files(golden, "dense_gqa", f"{source}_optim")
    unsharded = unshard(catalog, rules=RULES, store=store)
    assert_true_states(unsharded, store, golden, "dense_gqa")
    optimizer = unsharded.optimizer
    assert optimizer is not None
    assert (optimizer.kind, optimizer.states, optimizer.omits_empty) == (
        "float16",
        ("exp_avg", "exp_avg_sq"),
        None,
    )
    assert [len(group.params or ()) for group in optimizer.groups] == [18, 13]


# --- every layout of synthetic models
# ------------------------------------------------------------------


_LAYOUTS = [Topology(), Topology(tp=2, pp=2), Topology(tp=3, pp=4), Topology(pp=2, vpp=2)]


@pytest.mark.each_value
@pytest.mark.parametrize("b", _LAYOUTS, ids=str)
@pytest.mark.parametrize("a", _LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("model", "style"),
    [
        (TIED, Style(steps=True)),
        (DENSE, Style(order="seen", has_scaler=True)),
        (
            DENSE,
            Style(
                order="own", exempts="qk_norms", native=("linear_proj.bias", "k_layernorm.weight")
            ),
        ),
        (TIED, Style(has_masters=False)),
    ],
    ids=["tied", "scaler", "native", "fp32"],
)
def test_a_dense_optimizer_is_what_a_run_at_the_target_would_save(
    tmp_path: Path, model: Model, style: Style, a: Topology, b: Topology
) -> None:
    reshard(save(model, a, tmp_path / "a", style), tmp_path / "out", b)
    wanted = save(model, b, tmp_path / "b", style)
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)


_EXPERTS = [
    Topology(),
    Topology(tp=2, ep=2),
    Topology(pp=2, ep=4),
    Topology(tp=2, pp=2),
    Topology(tp=2, pp=2, ep=2, etp=1),
]
_LONG = [pytest.param(_EXPERTS[number], marks=pytest.mark.long) for number in (0, 2)]


@pytest.mark.each_value
@pytest.mark.parametrize("b", [_EXPERTS[1], *_EXPERTS[3:], *_LONG], ids=str)
@pytest.mark.parametrize("a", [_EXPERTS[1], *_EXPERTS[3:], *_LONG], ids=str)
@pytest.mark.parametrize(
    ("model", "style"),
    [
        (MOE, Style(native=("router.weight",))),
        (GROUPED, Style(order="seen")),
        (LATE, Style(steps=True)),
    ],
    ids=["sequential", "te_grouped", "late"],
)
def test_experts_come_to_an_optimizer_of_their_own_and_back(
    tmp_path: Path, model: Model, style: Style, a: Topology, b: Topology
) -> None:
    reshard(save(model, a, tmp_path / "a", style), tmp_path / "out", b, moe=True)
    wanted = save(model, b, tmp_path / "b", style)
    assert_same_optimizer(tmp_path / "out", wanted)


@pytest.mark.long
@pytest.mark.parametrize("a", [Topology(), Topology(tp=2, ep=2)], ids=str)
def test_legacy_grouped_experts_become_single_ones_with_their_states(
    tmp_path: Path, a: Topology
) -> None:
    model = replace(MOE, more_args={"moe_grouped_gemm": True})
    source = save(model, a, tmp_path / "a", Style(is_grouped=True))
    reshard(source, tmp_path / "out", Topology(tp=2, ep=4), moe=True, experts="sequential")
    wanted = save(MOE, Topology(tp=2, ep=4), tmp_path / "b")
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "b",
    [*_EXPERTS[2:], *(pytest.param(model, marks=pytest.mark.long) for model in _EXPERTS[:2])],
    ids=str,
)
@pytest.mark.parametrize("a", [Topology(), Topology(tp=2, ep=2), Topology(pp=2, ep=4)], ids=str)
@pytest.mark.parametrize(
    "style", [Style(is_grouped=True), Style(is_grouped=True, has_masters=False)], ids=str
)
def test_legacy_grouped_experts_keep_their_kind_and_their_states(
    tmp_path: Path, style: Style, a: Topology, b: Topology
) -> None:
    model = replace(MOE, more_args={"moe_grouped_gemm": True})
    reshard(save(model, a, tmp_path / "a", style), tmp_path / "out", b, moe=True)
    wanted = save(model, b, tmp_path / "b", style)
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)


@pytest.mark.parametrize("version", ["0.17", pytest.param("0.20", marks=pytest.mark.long)])
def test_grouped_experts_are_refused_for_a_megatron_without_them(
    tmp_path: Path, version: str
) -> None:
    model = replace(MOE, more_args={"moe_grouped_gemm": True})
    source = save(model, Topology(tp=2), tmp_path / "a", Style(is_grouped=True))
    asked = parse_version(version)
    err = refusal(source, tmp_path, megatron_version=asked)
    assert isinstance(err, UnsupportedError)
    assert f"(experts.weight1), which megatron-core {version} does not support" in err.message
    assert str(err.hint).endswith("--experts sequential")
    reshard(source, tmp_path / "out", Topology(tp=1), megatron_version=asked, experts="sequential")
    assert not any("weight1" in name for name in _names(tmp_path / "out"))
    reshard(source, tmp_path / "kept", Topology(tp=1), megatron_version=parse_version("0.16"))
    assert any("weight1" in name for name in _names(tmp_path / "kept"))


def _names(folder: Path) -> list[str]:
    """The names of the model's tensors on the first rank."""
    return list(load_rank_file(next(iter(rank_dirs(folder).values())) / MODEL_FILE)["model"])


@pytest.mark.long  # another test goes each way between other checkpoints
@pytest.mark.parametrize("a", [Topology(), Topology(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("b", [Topology(ep=2), Topology(pp=2, ep=4)], ids=str)
def test_single_experts_become_grouped_ones_with_their_states_and_back(
    tmp_path: Path, a: Topology, b: Topology
) -> None:
    grouped = replace(MOE, more_args={"moe_grouped_gemm": True})
    source = save(MOE, a, tmp_path / "a")
    reshard(source, tmp_path / "out", b, moe=True, experts="grouped", verify=True)
    wanted = save(grouped, b, tmp_path / "b", Style(is_grouped=True))
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)
    args = load_rank_file(next(iter(rank_dirs(tmp_path / "out").values())) / MODEL_FILE)["args"]
    assert args.moe_grouped_gemm is True
    reshard(tmp_path / "out", tmp_path / "back", a, moe=True, experts="sequential", verify=True)
    assert_same_optimizer(tmp_path / "back", source)
    assert_same_weights(tmp_path / "back", source)


_LEGACY = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
KINDS: dict[str, tuple[Model, Style]] = {
    "sequential": (replace(GROUPED, expert_names="sequential"), Style()),
    "te-grouped": (GROUPED, Style()),
    "grouped": (
        replace(GROUPED, expert_names="sequential", more_args=_LEGACY),
        Style(is_grouped=True),
    ),
}
"""Kinds of experts with Transformer Engine: model, and style of its files."""
RING = list(zip(KINDS, [*KINDS][1:] + [*KINDS][:1], strict=True))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        # Without --long, each kind is a source once and a target once.
        pytest.param(*pair, marks=[] if pair in RING else pytest.mark.long)
        for pair in permutations(KINDS, 2)
    ],
)
def test_every_kind_of_experts_becomes_every_other_with_its_states(
    tmp_path: Path, a: str, b: str
) -> None:
    source = save(KINDS[a][0], Topology(tp=2, ep=2), tmp_path / "a", KINDS[a][1])
    wanted = save(KINDS[b][0], Topology(pp=2, ep=4), tmp_path / "b", KINDS[b][1])
    reshard(source, tmp_path / "out", Topology(pp=2, ep=4), moe=True, experts=b)
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)
    names = [_names(folder) for folder in (tmp_path / "out", wanted)]
    assert [name for name in names[0] if "extra_state" not in name] == [
        name for name in names[1] if "extra_state" not in name
    ]
    args = load_rank_file(next(iter(rank_dirs(tmp_path / "out").values())) / MODEL_FILE)["args"]
    assert bool(args.moe_grouped_gemm) == (b != "sequential")
    assert bool(getattr(args, "moe_use_legacy_grouped_gemm", False)) == (b == "grouped")


def test_grouped_experts_stay_with_another_transformer_implementation(tmp_path: Path) -> None:
    model = replace(MOE, more_args={"moe_grouped_gemm": True})
    source = save(model, Topology(tp=2), tmp_path / "a", Style(is_grouped=True))
    reshard(source, tmp_path / "te", Topology(), moe=True, transformer_impl="transformer_engine")
    args = load_rank_file(next(iter(rank_dirs(tmp_path / "te").values())) / MODEL_FILE)["args"]
    assert args.moe_use_legacy_grouped_gemm is True
    # Back again, and with experts that only Transformer Engine has.
    options = {"transformer_impl": "local", "experts": "grouped"}
    reshard(tmp_path / "te", tmp_path / "b", Topology(tp=2), moe=True, **options)
    assert_same_weights(_without_extra_states(tmp_path / "b"), source)
    options = {"transformer_impl": "transformer_engine", "experts": "te-grouped"}
    reshard(source, tmp_path / "c", Topology(tp=2), moe=True, **options)
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight0" in _names(tmp_path / "c")
    options = {"transformer_impl": "local", "experts": "sequential"}
    reshard(tmp_path / "c", tmp_path / "d", Topology(tp=2), moe=True, **options)
    sequential = save(MOE, Topology(tp=2), tmp_path / "e")
    assert_same_weights(_without_extra_states(tmp_path / "d"), sequential)


def _without_extra_states(root: Path) -> Path:
    """Remove the empty states that files of Transformer Engine have, unlike the synthetic ones."""
    for folder in rank_dirs(root).values():
        content = load_rank_file(folder / MODEL_FILE)
        model = content["model"]
        for name in [name for name in model if name.endswith("_extra_state")]:
            assert model.pop(name) is None
        torch.save(content, folder / MODEL_FILE)
    return root


def test_a_kind_of_experts_that_the_model_cannot_have_is_refused(tmp_path: Path) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "dense")
    assert "the model has no experts" in refusal(source, tmp_path, experts="sequential").message
    source = save(MOE, Topology(tp=2), tmp_path / "moe")
    err = refusal(source, tmp_path, experts="te-grouped")
    assert "the local transformer implementation does not support te-grouped experts" in err.message
    assert "is not one of: sequential, grouped" in refusal(source, tmp_path, experts="x").message
    # The kind that they have already is no error.
    reshard(source, tmp_path / "out", Topology(), moe=True, experts="sequential")
    assert_same_weights(tmp_path / "out", save(MOE, Topology(), tmp_path / "b"))


@pytest.mark.parametrize("to", ["torch_dist", pytest.param("zarr", marks=pytest.mark.long)])
def test_grouped_experts_come_back_out_of_megatrons_distributed_formats(
    tmp_path: Path, to: str
) -> None:
    model = replace(MOE, more_args={"moe_grouped_gemm": True})
    style = Style(is_grouped=True)
    source = save(model, Topology(tp=2, ep=2), tmp_path / "a", style)
    run(Job(src=source, dst=tmp_path / "dist", to=to, fsync=False))
    reshard(
        tmp_path / "dist",
        tmp_path / "out",
        Topology(pp=2, ep=4),
        moe=True,
        to="megatron",
        verify=True,
    )
    wanted = save(model, Topology(pp=2, ep=4), tmp_path / "b", style)
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)
    options = {"to": "megatron", "experts": "sequential"}
    reshard(tmp_path / "dist", tmp_path / "single", Topology(tp=2, ep=4), moe=True, **options)
    wanted = save(MOE, Topology(tp=2, ep=4), tmp_path / "c")
    assert_same_optimizer(tmp_path / "single", wanted)
    assert_same_weights(tmp_path / "single", wanted)


@pytest.mark.parametrize("order", ["sorted", "own", pytest.param("seen", marks=pytest.mark.long)])
def test_empty_groups_are_listed_or_left_out_as_the_source_has_it(
    tmp_path: Path, order: str
) -> None:
    style = Style(order=order)
    a, b = Topology(pp=2, ep=2), Topology(tp=2, pp=4, ep=2)
    reshard(save(LATE, a, tmp_path / "a", style), tmp_path / "out", b, moe=True)
    assert_same_optimizer(tmp_path / "out", save(LATE, b, tmp_path / "b", style))
    first = load_rank_file(next(iter(rank_dirs(tmp_path / "out").values())) / MODEL_FILE)[
        "optimizer"
    ]
    assert isinstance(first, dict if order == "own" else list)


def test_before_the_first_step_there_are_only_masters(tmp_path: Path) -> None:
    style = Style(is_trained=False)
    reshard(save(DENSE, Topology(tp=2), tmp_path / "a", style), tmp_path / "out", Topology(pp=2))
    assert_same_optimizer(tmp_path / "out", save(DENSE, Topology(pp=2), tmp_path / "b", style))


def test_frozen_parameters_have_no_numbers(tmp_path: Path) -> None:
    style = Style(frozen=("embedding", "decoder.layers.1."))
    source = save(replace(DENSE, layers=2), Topology(), tmp_path / "a", style)
    reshard(source, tmp_path / "out", Topology(tp=2))
    wanted = save(replace(DENSE, layers=2), Topology(tp=2), tmp_path / "b", style)
    assert_same_optimizer(tmp_path / "out", wanted)
    assert_same_weights(tmp_path / "out", wanted)


def test_rows_of_padding_are_zero_in_every_state(tmp_path: Path) -> None:
    reshard(save(DENSE, Topology(), tmp_path / "a"), tmp_path / "out", Topology(tp=4))
    last = load_rank_file(rank_dirs(tmp_path / "out")["mp_rank_03"] / MODEL_FILE)
    assert last["model"]["embedding.word_embeddings.weight"].shape == (10, 12)
    states = last["optimizer"]["optimizer"]["state"][0]
    assert list(states) == ["exp_avg", "exp_avg_sq"]
    for tensor in (*states.values(), last["optimizer"]["fp32_from_fp16_params"][0][0]):
        assert tensor.shape == (10, 12)
        assert (tensor[7:] == 0).all()
        assert (tensor[:7] != 0).all()


# --- what is refused ------------------------------------------------------------------


def _groups(content: dict[str, Any]) -> Any:
    return content["optimizer"]["optimizer"]["param_groups"]


def test_settings_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(pp=2), tmp_path / "a")
    change(source, "mp_rank_00_001", lambda content: _groups(content)[1].update(lr=7.0))
    err = refusal(source, tmp_path)
    assert isinstance(err, CorruptError)
    assert "lr of the optimizer's param group 1 is 7.0, but 5e-05 in mp_rank_00_000" in err.message
    assert err.rank == "mp_rank_00_001"


def test_a_rank_without_an_optimizer_is_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "a")
    change(source, "mp_rank_01", lambda content: content.pop("optimizer"))
    err = refusal(source, tmp_path)
    assert isinstance(err, MissingShardError)
    assert err.rank == "mp_rank_01"


def test_a_number_that_a_group_lists_twice_is_an_error(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a", Style(has_masters=False))

    def twice(content: dict[str, Any]) -> None:
        optimizer = content["optimizer"]
        ids = optimizer["param_groups"][1]["params"]
        del optimizer["state"][ids[1]]
        ids[1] = ids[0]

    change(source, "mp_rank_00", twice)
    err = refusal(source, tmp_path)
    assert isinstance(err, CorruptError)
    assert "param group 1 lists parameter" in err.message
    assert err.rank == "mp_rank_00"


def test_masters_of_weights_that_are_cast_to_fp32_are_refused(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")
    err = refusal(source, tmp_path, dtype=((None, "float32"),))
    assert isinstance(err, UnsupportedError)
    assert "the parameter is float32 and has fp32 master weights" in err.message
    assert "--no-optim" in (err.hint or "")


def test_a_distributed_optimizer_whose_files_were_not_copied_is_named(
    golden: Path, tmp_path: Path
) -> None:
    source = tmp_path / "a"
    shutil.copytree(golden / "mcore_legacy" / "dense_gqa" / "tp2_pp1_dp2_distopt", source)
    for path in rank_dirs(source).values():
        (path / "distrib_optim.pt").unlink()
    err = refusal(source, tmp_path)
    assert isinstance(err, MissingShardError)
    assert "no rank has distrib_optim.pt" in err.message
    assert "--no-optim" in (err.hint or "")


def test_a_parameter_without_states_is_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")
    change(source, "mp_rank_00", lambda content: content["optimizer"]["optimizer"]["state"].pop(3))
    err = refusal(source, tmp_path)
    assert isinstance(err, MissingShardError)
    assert err.key is not None
    assert (
        "states are missing, but those of embedding.word_embeddings.weight of mp_rank_00 are"
        in err.message
    )


@pytest.mark.parametrize("step", [torch.tensor(6.0), 6, None])
def test_steps_that_differ_between_ranks_are_an_error(tmp_path: Path, step: object) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "a", Style(steps=True))
    change(
        source,
        "mp_rank_01",
        lambda content: content["optimizer"]["optimizer"]["state"][2].update(step=step),
    )
    err = refusal(source, tmp_path)
    assert isinstance(err, CorruptError)


def test_masters_that_do_not_round_to_the_weights_are_refused(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")
    change(
        source,
        "mp_rank_00",
        lambda content: content["optimizer"]["fp32_from_fp16_params"][0][1].add_(1000.0),
    )
    err = refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert err.key == "decoder.layers.0.self_attention.linear_proj.weight"
    assert "has master weights that round" in err.message
    assert "--no-optim" in (err.hint or "")


def test_groups_that_the_names_do_not_explain_are_told_by_their_masters(tmp_path: Path) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "a")

    def swap(content: dict[str, Any]) -> None:
        optimizer = content["optimizer"]
        for group in optimizer["optimizer"]["param_groups"]:
            group["wd_mult"] = 1.0 - group["wd_mult"]

    for folder in rank_dirs(source):
        change(source, folder, swap)
    reshard(source, tmp_path / "out", Topology(tp=2))
    assert_same_optimizer(tmp_path / "out", source)


def test_several_consistent_assignments_are_refused(tmp_path: Path) -> None:
    style = Style(has_masters=False, frozen=("decoder.layers.1.",))
    source = save(replace(DENSE, layers=2), Topology(), tmp_path / "a", style)
    err = refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert "in several ways" in err.message


def test_names_and_shapes_that_fit_no_group_are_refused(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")

    def transpose(content: dict[str, Any]) -> None:
        optimizer = content["optimizer"]
        for tensors in (optimizer["optimizer"]["state"][1], optimizer["fp32_from_fp16_params"][0]):
            for key in list(tensors) if isinstance(tensors, dict) else [1]:
                tensors[key] = tensors[key].t().contiguous()

    change(source, "mp_rank_00", transpose)
    err = refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert "names and shapes do not fit the optimizer's groups" in err.message
    assert err.rank == "mp_rank_00"


def test_an_optimizer_that_differs_in_a_tied_copy_is_found_out(tmp_path: Path) -> None:
    source = save(TIED, Topology(pp=2), tmp_path / "a")

    def damage(content: dict[str, Any]) -> None:
        groups = content["optimizer"]["optimizer"]["param_groups"]
        content["optimizer"]["optimizer"]["state"][groups[0]["params"][-1]]["exp_avg"][3, 3] += 1

    change(source, "mp_rank_00_001", damage)
    err = refusal(source, tmp_path)
    assert isinstance(err, CorruptError)
    assert err.key == "optimizer.state.exp_avg.embedding.word_embeddings.weight"


def test_an_entry_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "a", Style(has_scaler=True))
    change(
        source,
        "mp_rank_01",
        lambda content: content["optimizer"]["grad_scaler"].update(growth_tracker=4),
    )
    err = refusal(source, tmp_path)
    assert isinstance(err, CorruptError)
    assert "grad_scaler" in err.message


def test_settings_of_experts_that_differ_cannot_come_to_one_group(tmp_path: Path) -> None:
    source = save(MOE, Topology(ep=2), tmp_path / "a")

    def slower(content: dict[str, Any]) -> None:
        content["optimizer"][1]["optimizer"]["param_groups"][0]["lr"] = 1.0

    for folder in rank_dirs(source):
        change(source, folder, slower)
    err = refusal(source, tmp_path, moe=True)
    assert isinstance(err, UnsupportedError)
    assert "their lr values differ" in err.message


def _factored(optimizer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of a matrix under the names and in the shapes of other optimizers."""
    rows, columns = weight.shape
    if optimizer == "Adafactor":
        return {"exp_avg_sq_row": torch.ones(rows), "exp_avg_sq_col": torch.ones(columns)}
    if optimizer == "adaptive Muon":
        return {"momentum_buffer": weight, "moment2_buffer": torch.ones(rows, 1)}
    return {"exp_avg": weight, "exp_avg_sq": weight, "L": torch.eye(rows), "R": torch.eye(columns)}


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("Adafactor", "exp_avg_sq_row"), ("adaptive Muon", "moment2_buffer"), ("SOAP", "L")],
)
@pytest.mark.parametrize("has_masters", [True, False])
def test_states_of_another_shape_are_named_with_their_parameter_and_rank(
    tmp_path: Path, optimizer: str, state: str, has_masters: bool
) -> None:
    source = save(DENSE, Topology(), tmp_path / "a", Style(has_masters=has_masters))

    def factor(content: dict[str, Any]) -> None:
        inner = content["optimizer"]
        states = (inner["optimizer"] if has_masters else inner)["state"]
        for number, of_param in states.items():
            if of_param["exp_avg"].ndim == 2:
                states[number] = _factored(optimizer, of_param["exp_avg"])
            elif optimizer == "adaptive Muon":
                states[number] = {
                    "momentum_buffer": of_param["exp_avg"],
                    "moment2_buffer": of_param["exp_avg_sq"],
                }

    change(source, "mp_rank_00", factor)
    err = refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert err.message.startswith(f"the optimizer state {state} of {optimizer} has shape (")
    assert err.key == "embedding.word_embeddings.weight"
    assert err.rank == "mp_rank_00"
    assert "--no-optim" in (err.hint or "")


def test_a_chain_with_soap_is_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")

    def chain(content: dict[str, Any]) -> None:
        first = content["optimizer"]
        states = first["optimizer"]["state"]
        soap = {**first["optimizer"], "state": {0: _factored("SOAP", states[0]["exp_avg"])}}
        content["optimizer"] = [{**first, "optimizer": soap}, first]

    change(source, "mp_rank_00", chain)
    assert "2 chained optimizers (SOAP is one of them)" in refusal(source, tmp_path).message


def test_other_chained_optimizers_are_refused(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")
    change(
        source, "mp_rank_00", lambda content: content.update(optimizer=[content["optimizer"]] * 2)
    )
    err = refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert "chained" in err.message
