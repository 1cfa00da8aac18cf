"""Training goes on in real megatron-core where DeepSpeed's ZeRO or FSDP2 left a Llama of
transformers, or torchtitan its own: the states are theirs, and so are the losses of the steps that
follow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.verbs.convert.job import Job
from core.verbs.convert.run import run as convert
from tests.real_megatron.megatron import Form, Megatron
from tests.real_megatron.resharding import assert_equal, change_to
from tests.real_megatron.setting import BATCH, Layout, Model, Optimizer, Run

LLAMA = Model(layers=2, hidden=16, heads=4, groups=2, ffn=24, vocab=32)
FP32, FLOAT16, DISTRIBUTED = Optimizer(kind="fp32"), Optimizer(), Optimizer(kind="distributed")
TORCH_DIST = Form("torch_dist", "fully_reshardable")
RENAMED = {"strip_prefix": ("app.model.",), "rename": ((r"^app\.optim\.", "optimizer."),)}
CASES = {
    "zero1_to_tp2": ("zero1", FP32, Layout(tp=2), Form()),
    "zero3_to_dp2": ("zero3", DISTRIBUTED, Layout(dp=2), TORCH_DIST),
    "fsdp2_to_distributed_dp2": ("fsdp2", DISTRIBUTED, Layout(dp=2), TORCH_DIST),
    "torchtitan_to_tp2": ("torchtitan", FP32, Layout(tp=2), Form()),
}
LONG = {
    "zero1_to_distributed_tp2": ("zero1", DISTRIBUTED, Layout(tp=2), TORCH_DIST),
    "zero2_to_distributed_pp2": ("zero2", DISTRIBUTED, Layout(pp=2), TORCH_DIST),
    "zero3_to_tp2pp2": ("zero3", FLOAT16, Layout(tp=2, pp=2), Form()),
    "zero2_to_pp2": ("zero2", FLOAT16, Layout(pp=2), Form()),
    "fsdp2_to_tp2pp2": ("fsdp2", FP32, Layout(tp=2, pp=2), Form()),
    "torchtitan_to_distributed_dp2": ("torchtitan", DISTRIBUTED, Layout(dp=2), TORCH_DIST),
}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)]
)
def test_megatron_goes_on_where_another_trainer_stopped(
    worker: Megatron, llama_runs: Path, torchtitan_run: Path, tmp_path: Path, case: str
) -> None:
    source, optimizer, layout, form = {**CASES, **LONG}[case]
    run = torchtitan_run if source == "torchtitan" else llama_runs / source
    is_dcp = source in ("fsdp2", "torchtitan")
    convert(
        Job(
            src=run / ("step-3" if is_dcp else ""),
            dst=tmp_path / "megatron",
            to="megatron" if form.name == "rank_files" else form.name,
            topology=change_to(layout, Layout()),
            config=run / "config.json" if is_dcp else None,
            dtype=((None, "bf16"),) if optimizer.is_bf16 else (),
            make_vocab_size_divisible_by=LLAMA.divisible_by,
            transformer_impl="local",
            fsync=False,
            **(RENAMED if source == "fsdp2" else {}),  # type: ignore[arg-type]
        )
    )
    training = Run(model=LLAMA, layout=layout, optimizer=optimizer)
    result = worker.load(training, form, tmp_path / "megatron", out=tmp_path / "out")

    # All values are those of the live engine, fused by hand.
    truth = torch.load(run / "truth.pt")
    expected = fused_by_hand(truth["states"], is_bf16=optimizer.is_bf16)
    assert_equal(expected, result.before, rows=None)

    # Megatron's next two steps are those that the other trainer made, as precisely as bf16 can.
    assert len(result.losses) == 2 * BATCH
    losses = [sum(result.losses[i : i + BATCH]) / BATCH for i in (0, BATCH)]
    is_exact = source in ("zero1", "fsdp2", "torchtitan") and not optimizer.is_bf16
    assert losses == pytest.approx(truth["losses"], rel=1e-5 if is_exact else 5e-3)


def fused_by_hand(
    states: dict[str, dict[str, torch.Tensor]], *, is_bf16: bool
) -> dict[str, torch.Tensor]:
    """Megatron's key → tensor, layers stacked, of the states by the names of transformers."""
    result: dict[str, torch.Tensor] = {}
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        of = {name: entry[state].reshape(entry["fp32"].shape) for name, entry in states.items()}
        tensors = {
            "embedding.word_embeddings.weight": of["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": of["model.norm.weight"],
            "output_layer.weight": of["lm_head.weight"],
        }
        layers = [_layer(of, f"model.layers.{n}.") for n in range(LLAMA.layers)]
        for key in layers[0]:
            tensors[f"decoder.layers.{key}"] = torch.stack([layer[key] for layer in layers])
        for key, tensor in tensors.items():
            if state != "fp32":
                result[f"{state}/{key}"] = tensor
            elif is_bf16:
                result[key], result[f"fp32_param/{key}"] = tensor.bfloat16(), tensor
            else:
                result[key] = tensor
    return result


def _layer(of: dict[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    """One layer: rows of a group's two queries, its key and its value lie together."""
    groups = [
        of[f"{start}self_attn.{letter}_proj.weight"].reshape(LLAMA.groups, -1, LLAMA.hidden)
        for letter in "qkv"
    ]
    gate, up = (of[f"{start}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    return {
        "self_attention.linear_qkv.layer_norm_weight": of[f"{start}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat(groups, 1).reshape(-1, LLAMA.hidden),
        "self_attention.linear_proj.weight": of[f"{start}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": of[f"{start}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([gate, up]),
        "mlp.linear_fc2.weight": of[f"{start}mlp.down_proj.weight"],
    }
