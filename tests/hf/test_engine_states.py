"""torch_dist for Transformer Engine has the extra states that Megatron requests from it.

The names are those in checkpoints that Megatron and NeMo save with Transformer Engine, which does
not run on a CPU: NVIDIA/Megatron-LM#6270, NVIDIA/cosmos#69 (``self_attention.q_layernorm``),
NVIDIA/Megatron-LM#602 (``core_attention``).
"""

from __future__ import annotations

from pathlib import Path

from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.hf.models import saved

_DENSE = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EXPERTS = (
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
)


def _states(path: Path) -> dict[str, object]:
    objects = open_checkpoint(path).catalog.objects
    return {
        key.removeprefix("decoder."): item for key, item in objects.items() if "_extra_state" in key
    }


def _converted(folder: Path, *, impl: str | None = None) -> dict[str, object]:
    dst = folder.parent / f"dist_{impl}"
    run(Job(src=folder, dst=dst, to="torch_dist", transformer_impl=impl, fsync=False))
    return _states(dst)


def test_every_module_of_transformer_engine_has_a_state(tmp_path: Path) -> None:
    states = _converted(saved("llama", tmp_path / "model"), impl="transformer_engine")
    layers = {
        f"layers.{module}._extra_state/shard_{number}_3" for module in _DENSE for number in range(3)
    }
    assert set(states) == {*layers, "final_layernorm._extra_state/shard_0_1"}


def test_every_expert_has_a_state(tmp_path: Path) -> None:
    states = _converted(saved("qwen3_moe", tmp_path / "model"), impl="transformer_engine")
    names = {key.partition("/shard_")[0].removesuffix("._extra_state") for key in states}
    names = {name.removeprefix("layers.") for name in names}
    experts = {f"mlp.experts.experts.linear_fc{number}" for number in (1, 2)}
    assert names == {*_EXPERTS, *experts, "final_layernorm"}
    assert any(".3_" in key for key in states if "experts.linear_fc1" in key)


def test_from_the_local_implementation_they_are_added(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    wanted = _converted(folder, impl="transformer_engine")
    local = _converted(folder, impl="local")
    assert set(local) < set(wanted)
    dst = tmp_path / "engine"
    run(
        Job(
            src=tmp_path / "dist_local",
            dst=dst,
            to="torch_dist",
            transformer_impl="transformer_engine",
            fsync=False,
        )
    )
    assert set(_states(dst)) == set(wanted)
