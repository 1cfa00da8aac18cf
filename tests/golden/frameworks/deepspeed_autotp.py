"""Saves a Llama after two steps with DeepSpeed's AutoTP, and DeepSpeed's universal form of it.

    torchrun --nproc-per-node 4 deepspeed_autotp.py CASE FOLDER

CASE is autotp_zero1 or autotp_zero3: two tensor-parallel, two data-parallel ranks.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed_universal import write_truth
from transformers import LlamaConfig, LlamaForCausalLM


def main(case: str, folder: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=22,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    net = LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(case[-1])},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": 2},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    for step in range(2):
        torch.manual_seed(step * 10)
        tokens = torch.randint(0, 22, (2, 7))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"iteration": 7})
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if is_first:
        write_truth(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
