"""Checkpoints of Megatron-FSDP in other formats and layouts, against what the live run held."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from core.errors import MissingShardError, UnsupportedError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as convert
from tests.real_megatron.megatron import Form, megatron
from tests.real_megatron.setting import ITERATION, Layout, Model, Optimizer, Run

STEP = f"iter_{ITERATION:07d}"
DENSE = Model(layers=2, hidden=16, ffn=24, vocab=60, divisible_by=16)
EXPERTS = replace(DENSE, experts=4, first_dense=1)
BF16, FP32 = Optimizer(kind="distributed"), Optimizer(kind="fp32")
RUNS = {
    "dense_dp2": Run(model=DENSE, layout=Layout(dp=2), optimizer=BF16),
    "experts": Run(model=EXPERTS, optimizer=BF16),
    "experts_ep2": Run(model=EXPERTS, layout=Layout(ep=2, dp=2), optimizer=BF16),
    "tied_tp2": Run(model=replace(DENSE, is_tied=True), layout=Layout(tp=2), optimizer=BF16),
    "fp32_dp2": Run(
        model=replace(DENSE, is_gated=False, has_bias=True, normalization="LayerNorm"),
        layout=Layout(dp=2),
        optimizer=FP32,
    ),
}
"""The runs in the archive, as tests/golden/frameworks/megatron_fsdp.py names them."""


def truth(folder: Path) -> dict[str, torch.Tensor]:
    """``STATE.NAME`` → masters and moments of the live optimizer."""
    tensors: dict[str, torch.Tensor] = torch.load(folder / "truth.pt")
    return tensors


def as_torch(src: Path, dst: Path) -> dict[str, torch.Tensor]:
    """The tensors of a DCP directory by key, as torch reads them."""
    dcp_to_torch_save(src, dst)
    flat: dict[str, torch.Tensor] = {}

    def add(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                add(f"{prefix}.{name}" if prefix else name, value)
        elif isinstance(node, torch.Tensor):
            flat[prefix] = node

    add("", torch.load(dst, weights_only=False))
    return flat


def place_in(stored: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """A parameter or state in torch_dist, which stacks layers of a model that are alike, and
    experts, and names norms as Transformer Engine fuses them.
    """
    key = key.replace("fp32_param", "param", 1)
    key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if key in stored:
        return stored[key]
    match = re.fullmatch(r"(.*\.layers)\.(\d+)(\..*)", key)
    assert match is not None, key
    expert = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)(\..*)", key)
    if expert is not None:
        return stored[f"{expert[1]}.experts{expert[3]}"][int(expert[2])]
    return stored[match[1] + match[3]][int(match[2])]


@pytest.mark.parametrize("case", RUNS)
def test_torch_dist_has_the_masters_and_moments_of_the_run(
    megatron_fsdp: Path, tmp_path: Path, case: str
) -> None:
    convert(Job(src=megatron_fsdp / case, dst=tmp_path / "out", to="torch_dist"))
    stored = as_torch(tmp_path / "out" / STEP, tmp_path / "out.pt")
    for key, tensor in truth(megatron_fsdp / case).items():
        state, _, name = key.partition(".")
        assert torch.equal(place_in(stored, f"optimizer.state.{state}.{name}"), tensor), key
        if state == "fp32_param":
            dtype = torch.bfloat16 if RUNS[case].optimizer.is_bf16 else torch.float32
            assert torch.equal(place_in(stored, name), tensor.to(dtype)), key


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("dense_dp2", TopologyChange(tp=2, pp=1)),
        ("experts", TopologyChange(tp=1, pp=2, ep=2)),
        ("experts_ep2", TopologyChange(tp=2, ep=1)),
        ("tied_tp2", TopologyChange(tp=1, pp=2)),
    ],
)
def test_rank_files_are_those_made_of_torch_dist(
    megatron_fsdp: Path, tmp_path: Path, case: str, change: TopologyChange
) -> None:
    src = megatron_fsdp / case
    convert(Job(src=src, dst=tmp_path / "global", to="torch_dist"))
    convert(Job(src=tmp_path / "global", dst=tmp_path / "by_way", to="megatron", topology=change))
    convert(Job(src=src, dst=tmp_path / "direct", to="megatron", topology=change))
    files = sorted(
        path.relative_to(tmp_path / "direct") for path in tmp_path.glob("direct/**/*.pt")
    )
    assert files
    for file in files:
        direct, by_way = (
            torch.load(tmp_path / name / file, weights_only=False) for name in ("direct", "by_way")
        )
        assert tensors_of(direct) == tensors_of(by_way)


def tensors_of(node: object, prefix: str = "") -> dict[str, bytes]:
    """Bytes of all tensors in a tree, by place."""
    if isinstance(node, torch.Tensor):
        return {prefix: node.contiguous().view(-1).view(torch.uint8).numpy().tobytes()}
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    return {
        place: data
        for name, value in items
        for place, data in tensors_of(value, f"{prefix}/{name}").items()
    }


def test_hugging_face_gets_the_stored_weights(megatron_fsdp: Path, tmp_path: Path) -> None:
    convert(Job(src=megatron_fsdp / "dense_dp2", dst=tmp_path / "hf", to="hf", names="hf:llama"))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    gate_up = truth(megatron_fsdp / "dense_dp2")[
        "fp32_param.decoder.layers.1.mlp.linear_fc1.weight"
    ]
    halves = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(torch.cat(halves), gate_up)


def with_other_names(folder: Path, dst: Path, old: bytes, new: bytes) -> Path:
    """A copy of a checkpoint in whose metadata a part of the keys is another of the same length."""
    shutil.copytree(folder, dst)
    metadata = dst / STEP / ".metadata"
    data = metadata.read_bytes()
    assert old in data and len(old) == len(new)
    metadata.write_bytes(data.replace(old, new))
    return dst


def test_a_missing_half_is_named(megatron_fsdp: Path, tmp_path: Path) -> None:
    half = b"layers.1.mlp.linear_fc1.weight_v"
    src = with_other_names(
        megatron_fsdp / "dense_dp2", tmp_path / "src", half, half.replace(b"_v", b"_x")
    )
    with pytest.raises(MissingShardError, match="other half is present") as caught:
        convert(Job(src=src, dst=tmp_path / "out", to="torch_dist"))
    assert str(caught.value.key).endswith("layers.1.mlp.linear_fc1.weight_v")


def test_an_unknown_state_is_refused_by_name(megatron_fsdp: Path, tmp_path: Path) -> None:
    src = with_other_names(
        megatron_fsdp / "dense_dp2", tmp_path / "src", b"exp_avg_sq", b"exp_avg_xy"
    )
    with pytest.raises(UnsupportedError, match="state 'exp_avg_xy'") as caught:
        convert(Job(src=src, dst=tmp_path / "out", to="torch_dist"))
    assert "--no-optim" in str(caught.value.hint)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "layout", "form"),
    [
        ("dense_dp2", Layout(tp=2), Form()),
        ("dense_dp2", Layout(pp=2), Form("torch_dist", "fully_reshardable")),
        ("experts", Layout(ep=2, dp=2), Form()),
        ("experts", Layout(tp=2), Form("torch_dist", "fully_reshardable")),
        ("experts_ep2", Layout(pp=2), Form("torch_dist", "fully_reshardable")),
        ("tied_tp2", Layout(pp=2), Form()),
    ],
)
def test_megatron_goes_on_without_fsdp(
    megatron_fsdp: Path, tmp_path: Path, case: str, layout: Layout, form: Form
) -> None:
    run = RUNS[case].at(layout)
    change = TopologyChange(
        tp=layout.tp, pp=layout.pp, ep=layout.ep if run.model.experts is not None else None
    )
    to = "megatron" if form.name == "rank_files" else "torch_dist"
    convert(Job(src=megatron_fsdp / case, dst=tmp_path / "src", to=to, topology=change))
    with megatron() as worker:
        result = worker.load(run, form, tmp_path / "src", out=tmp_path / "loaded")
    live = {
        place.replace("/", ".", 1).replace("fp32_param", "param", 1): tensor
        for place, tensor in result.before.items()
    }
    for key, tensor in truth(megatron_fsdp / case).items():
        # The padding rows of the vocabulary are as many as the layout needs.
        n_rows = run.model.vocab
        assert torch.equal(place_in(live, key)[:n_rows], tensor[:n_rows]), key
