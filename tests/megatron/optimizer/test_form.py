from __future__ import annotations

import pytest

from core.megatron.optimizer.form import TITLES, optim_format_of, role_of

BUCKET = (
    "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
    "torch.float32).bucket_idx_0"
)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "model"),
        ("model.decoder.layers.0.mlp.linear_fc1.weight", "model"),
        ("app.model.model.embed_tokens.weight", "model"),
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "moments"),
        ("app.optim.state.lm_head.weight.exp_avg_sq", "moments"),
        ("app.optim.state.lm_head.weight.step", "other"),
        ("optimizer.state.fp32_param.output_layer.weight", "masters"),
        ("optimizer.state.param.output_layer.weight", "masters"),
        (f"{BUCKET}.param", "masters"),
        (f"{BUCKET}.exp_avg", "moments"),
        ("optimizer.fp32_from_fp16_params.0.3", "masters"),
        ("optimizer.optimizer.state.7.exp_avg", "moments"),
        ("distrib_optim.0.(torch.bfloat16, torch.float32).param", "masters"),
        ("rng_state.0.cuda_rng_state", "other"),
        ("lr_scheduler.last", "other"),
        ("callbacks.ModelCheckpoint.best_model_score", "other"),
        ("decoder.layers.0.mlp.linear_fc1._extra_state", "other"),
    ],
)
def test_every_tensor_counts_to_one_group(key: str, role: str) -> None:
    assert role_of(key) == role


@pytest.mark.parametrize(
    ("tensors", "objects", "name"),
    [
        (["decoder.w"], ["rng_state/shard_0.0_2.2"], None),
        (
            ["optimizer.fp32_from_fp16_params.0.0", "optimizer.optimizer.state.0.exp_avg"],
            [],
            "megatron_float16",
        ),
        (["distrib_optim.0.k.param"], [], "megatron_distributed"),
        (["optimizer.state.fp32_param.w", "optimizer.state.exp_avg.w"], [], "per_parameter"),
        (["optimizer.state.param.w", "optimizer.state.exp_avg.w"], [], "fully_reshardable"),
        ([f"{BUCKET}.param", f"{BUCKET}.exp_avg"], [], "dp_reshardable"),
        (
            ["w"],
            ["optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"],
            "dp_zero_gather_scatter",
        ),
        (["app.optim.state.w.exp_avg", "app.optim.state.w.step"], [], "torch_by_name"),
        (["optimizer.state.0.exp_avg"], [], "torch_by_number"),
        (["optimizer.state.w.odd"], [], "other"),
    ],
)
def test_the_form_of_the_optimizer_is_told_from_the_keys(
    tensors: list[str], objects: list[str], name: str | None
) -> None:
    assert optim_format_of(tensors, objects) == name
    assert name is None or TITLES[name]


def test_reformulated_shapes_mean_flattened_ranges() -> None:
    keys = ["optimizer.state.fp32_param.w", "optimizer.state.exp_avg.w"]
    assert optim_format_of(keys, [], has_flattened=True) == "fully_sharded_model_space"
