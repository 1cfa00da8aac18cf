"""Training goes on in real megatron-core after the way through DeepSpeed's universal checkpoint
under Hugging Face's names, at another layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.verbs.convert.job import Job
from core.verbs.convert.run import run as convert
from tests.real_megatron.megatron import Form, Megatron
from tests.real_megatron.resharding import assert_same, change_to
from tests.real_megatron.setting import SEQUENCE, Layout, Model, Optimizer, Run

DENSE = Model(vocab=50)
TIED = Model(is_tied=True, vocab=60, divisible_by=8)
MOE = Model(experts=4, qk_layernorm=True)
WIDE = Model(hidden=128, ffn=64)
TP2PP2 = Layout(tp=2, pp=2)

SHORT = {"moe_ep2_to_pp2": (MOE, Optimizer(), Layout(ep=2, dp=2), Layout(pp=2), Form())}
LONG = {
    "dense_tp2pp2_to_tp2": (DENSE, Optimizer(), TP2PP2, Layout(tp=2), Form()),
    "tied_tp2_to_pp2": (TIED, Optimizer(), Layout(tp=2), Layout(pp=2), Form()),
    "fp32_tp2_to_pp2": (DENSE, Optimizer(kind="fp32"), Layout(tp=2), Layout(pp=2), Form()),
    "distributed_dp2_to_tp2": (
        WIDE,
        Optimizer(kind="distributed"),
        Layout(dp=2),
        Layout(tp=2),
        Form("torch_dist", "fully_reshardable"),
    ),
}


@pytest.mark.parametrize(
    "case", [*SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)]
)
def test_training_goes_on_after_the_way_through_deepspeed(
    worker: Megatron, tmp_path: Path, case: str
) -> None:
    model, optimizer, source, target, form = {**SHORT, **LONG}[case]
    training = Run(model=model, layout=source, optimizer=optimizer)
    before = worker.save(training, [(form, tmp_path / "saved")], out=tmp_path / "source")
    config = _write_config(model, tmp_path / "config.json")

    # The worker's arguments fit several families, as they state no more than it needs.
    family = "qwen3_moe" if model.experts else "llama"
    saved, universal = tmp_path / "saved", tmp_path / "universal"
    convert(Job(src=saved, dst=universal, to="ucp", names=f"hf:{family}", fsync=False))
    convert(
        Job(
            src=universal,
            dst=tmp_path / "back",
            to="megatron" if form.name == "rank_files" else form.name,
            topology=change_to(target, replace(source, ep=1, dp=1)),
            config=config,
            dtype=((None, "bf16"),) if optimizer.is_bf16 else (),
            make_vocab_size_divisible_by=model.divisible_by,
            transformer_impl="local",
            fsync=False,
        )
    )
    after = worker.load(training.at(target), form, tmp_path / "back", out=tmp_path / "target")
    assert_same(training, target, before, after)


def _write_config(model: Model, path: Path) -> Path:
    """Write the configuration of the worker's model, whose arguments do not say all of it."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.hidden // model.heads,
        "max_position_embeddings": SEQUENCE,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.is_tied,
    }
    config = LlamaConfig(**sizes)
    if model.experts:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=model.ffn, num_experts=model.experts)
    path.write_text(config.to_json_string(use_diff=False))
    return path
