"""BERT and T5 as megatron-core builds them, for the tests: run as a program, with a JSON list of
cases.

One process a rank, on gloo, without a GPU. Every parameter gets the values that its place in the
global tensor has, by the offsets of the model's own ``sharded_state_dict``. Rank files are written
as the training script writes them, and beside them a torch_dist checkpoint by megatron-core's own
saving.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCAB, DIVISIBLE_BY = 60, 4
N_LAYERS, N_ENCODER = 4, 2
"""Layers of BERT and of T5's decoder; of T5's encoder."""


def main() -> None:
    """Writes every case into its directory."""
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.models.bert.bert_model
    import megatron.core.models.T5.t5_model  # noqa: F401 (once for all ranks, which are forks)

    for case in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as meeting_dir:
            torch.multiprocessing.start_processes(
                _rank, (case, meeting_dir), nprocs=case["tp"] * case["pp"], start_method="fork"
            )


def padded(tp: int) -> int:
    """Rows of the vocabulary at a TP size."""
    return -(-VOCAB // (DIVISIBLE_BY * tp)) * DIVISIBLE_BY * tp


def _rank(rank: int, case: dict[str, Any], meeting_dir: str) -> None:
    warnings.simplefilter("ignore")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    n = case["tp"] * case["pp"]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_dir}/ranks", rank=rank, world_size=n
    )
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = (
        queue.Queue()
    )  # its own comes from a process that takes seconds to start
    parallel_state.initialize_model_parallel(case["tp"], case["pp"])
    model = _built(case).bfloat16()
    sharded = model.sharded_state_dict()
    _fill(model, sharded)
    args = _args(case)
    entries = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    for kind in ("ranks", "dist"):
        (Path(case["dir"]) / kind / "iter_0000010" / (name if kind == "ranks" else "")).mkdir(
            parents=True, exist_ok=True
        )
        (Path(case["dir"]) / kind / "latest_checkpointed_iteration.txt").write_text("10")
    folder = Path(case["dir"]) / "ranks" / "iter_0000010" / name
    torch.save(
        {**entries, "model": model.state_dict_for_save_checkpoint()}, folder / "model_optim_rng.pt"
    )
    dist.barrier()
    dist_checkpointing.save(
        {**entries, "model": sharded}, str(Path(case["dir"]) / "dist" / "iter_0000010")
    )
    dist.barrier()
    dist.destroy_process_group()


def _built(case: dict[str, Any]) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_config import TransformerConfig

    def config(n_layers: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers=n_layers,
            hidden_size=16,
            num_attention_heads=4,
            ffn_hidden_size=32,
            use_cpu_initialization=True,
            tensor_model_parallel_size=case["tp"],
            pipeline_model_parallel_size=case["pp"],
            pipeline_dtype=torch.bfloat16,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
        )

    common: dict[str, Any] = {
        "vocab_size": padded(case["tp"]),
        "max_sequence_length": 12,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": case["is_tied"],
    }
    if case["kind"] == "bert":
        return BertModel(config(N_LAYERS), 2, bert_layer_local_spec, **common)
    t5_spec.TENorm = (
        t5_spec.LNImpl
    )  # the local specification of 0.16.1 names Transformer Engine's norm
    return T5Model(
        config(N_LAYERS),
        config(N_ENCODER),
        t5_spec.get_t5_encoder_with_local_block_spec(N_ENCODER),
        t5_spec.get_t5_decoder_with_local_block_spec(N_LAYERS),
        position_embedding_type=case.get("positions", "learned_absolute"),
        **common,
    )


def _fill(model: torch.nn.Module, sharded: dict[str, Any]) -> None:
    """Gives every element a value of its place in the global tensor; padding rows are zeros."""
    own = model.state_dict(keep_vars=True)
    for name, sharded_tensor in sharded.items():
        if not isinstance(own.get(name), torch.Tensor):
            continue
        shape = sharded_tensor.global_shape
        start = zlib.crc32(sharded_tensor.key.encode()) % 1000
        values = ((torch.arange(torch.Size(shape).numel()) + start) % 1021).reshape(shape)
        if "word_embeddings" in sharded_tensor.key or "output_layer" in sharded_tensor.key:
            values[VOCAB:] = 0
        for axis, offset in enumerate(sharded_tensor.global_offset):
            local = (
                1
                if axis < sharded_tensor.prepend_axis_num
                else sharded_tensor.local_shape[axis - sharded_tensor.prepend_axis_num]
            )
            values = values.narrow(axis, offset, local)
        with torch.no_grad():
            own[name].copy_(values.reshape(own[name].shape))


def _args(case: dict[str, Any]) -> argparse.Namespace:
    is_bert = case["kind"] == "bert"
    return argparse.Namespace(
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        world_size=case["tp"] * case["pp"],
        num_layers=N_LAYERS,
        encoder_num_layers=N_LAYERS if is_bert else N_ENCODER,
        decoder_num_layers=None if is_bert else N_LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        group_query_attention=False,
        num_query_groups=1,
        kv_channels=4,
        ffn_hidden_size=32,
        swiglu=False,
        transformer_impl="local",
        untie_embeddings_and_output_weights=not case["is_tied"],
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=DIVISIBLE_BY,
        padded_vocab_size=padded(case["tp"]),
    )


if __name__ == "__main__":
    main()
