"""Recognise entries that differ because layout, format or directory do, not the content.

A checkpoint that was resharded or converted has the same content, although its arguments record
other sizes. Such entries are reported, but do not make two checkpoints different.
"""

from __future__ import annotations

from core.megatron.extras.common_state import CONTENT, RERUN, RNG
from core.verbs.diff.entries import EntryDiff
from core.verbs.diff.sides import Side

_SIZES = frozenset({
    "tensor_model_parallel_size", "tensor_parallel_num_weight_shards",
    "pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "expert_tensor_parallel_num_weight_shards",
    "context_parallel_size", "data_parallel_size", "world_size", "inprocess_active_world_size",
    "overlap_p2p_comm", "align_param_gather", "sequence_parallel", "padded_vocab_size",
    "make_vocab_size_divisible_by", "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "hybrid_layer_pattern", "hybrid_override_pattern", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "rank", "local_rank",
})  # fmt: skip
"""Megatron's arguments that depend on the topology, some of which Megatron derives from others."""
_FORMS = frozenset({
    "ckpt_format", "use_dist_ckpt", "transformer_impl", "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm", "use_mcore_models", "use_distributed_optimizer",
    "dist_ckpt_optim_fully_reshardable",
})  # fmt: skip
"""Megatron's arguments that depend on the checkpoint's format or the model's implementation."""
_PLACES = frozenset({"save", "load"})
_ARGS = frozenset(f"args.{name}" for name in _SIZES | _FORMS | _PLACES)


def is_of_layout(entry: EntryDiff, a: Side, b: Side) -> bool:
    """Return whether an entry differs only because the layout, the format or the directory does."""
    path = entry.path
    if path in _ARGS or path == CONTENT or path.startswith(f"{CONTENT}."):
        return True
    if path == "optimizer.step" and entry.kind != "changed":
        return True  # the groups, or the states of parameters, record the step as well
    is_other_format = a.source.format is not b.source.format
    is_other_layout = a.topology != b.topology
    # Formats and layouts differ in how they store the rerun machine, layouts in random states.
    if path.startswith(RERUN):
        return is_other_format or is_other_layout
    if path.startswith(f"{RNG}/shard"):
        return is_other_layout
    # Small files such as config.json accompany the weights in some formats only.
    if entry.kind in ("only_a", "only_b") and is_other_format:
        return path in (a if entry.kind == "only_a" else b).catalog.files
    return False
