"""Saves small models of torchtitan, and what its adapters make of them.

    torchrun --nproc-per-node 3 torchtitan_names.py FOLDER

Writes FOLDER/CASE/step-2, a DCP with the optimizer, whose tensors are cut by rows over three ranks
(FSDP2's cut, which goes through heads), the model's config.json, to_hf.safetensors (torchtitan's
state dict adapter); of llama also logits.pt (tokens, and the logits of torchtitan's model).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

DIM, N_TOKENS, HEAD = 32, 40, 8
WEIGHT, NORM = {"weight": torch.nn.init.normal_}, {"weight": torch.nn.init.ones_}
ROPE = {"dim": HEAD, "max_seq_len": 128, "theta": 10000.0}
HEADS = {"n_heads": 4, "n_kv_heads": 2, "attn_backend": "flex"}


def llama(*, is_tied: bool) -> llama3.Llama3Model.Config:
    layers = llama3._build_llama3_layers(
        n_layers=1 if is_tied else 2,
        dim=DIM,
        hidden_dim=48,
        rope=ComplexRoPE.Config(**ROPE),
        **HEADS,
    )
    return llama3.Llama3Model.Config(enable_weight_tying=is_tied, layers=layers, **ends())


def qwen3_moe() -> qwen3.Qwen3Model.Config:
    layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True,
        n_layers=1,
        dim=DIM,
        head_dim=HEAD,
        moe_hidden_dim=16,
        num_experts=4,
        top_k=2,
        rope=CosSinRoPE.Config(**ROPE),
        moe_comm_backend="standard",
        **HEADS,
    )
    return qwen3.Qwen3Model.Config(layers=layers, **ends())


def ends() -> dict[str, object]:
    embedding = Embedding.Config(num_embeddings=N_TOKENS, embedding_dim=DIM, param_init=WEIGHT)
    return {
        "dim": DIM,
        "vocab_size": N_TOKENS,
        "tok_embeddings": embedding,
        "norm": RMSNorm.Config(normalized_shape=DIM, param_init=NORM),
        "lm_head": Linear.Config(in_features=DIM, out_features=N_TOKENS, param_init=WEIGHT),
    }


class CausalAttention(torch.nn.Module):
    """Stands in for flex attention, which is compiled for a GPU."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object
    ) -> torch.Tensor:
        heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        result = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        )
        return result.transpose(1, 2)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CASES = {
    "llama": (llama(is_tied=False), Llama3StateDictAdapter, LLAMA),
    "llama_tied": (llama(is_tied=True), Llama3StateDictAdapter, LLAMA),
    "qwen3_moe": (qwen3_moe(), Qwen3StateDictAdapter, MOE),
}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for case, (settings, adapter, names) in CASES.items():
        model = settings.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

        # Save the tensors as FSDP2 cuts them.
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        state = {
            **{
                name: distribute_tensor(weight, mesh, [Shard(0)])
                for name, weight in weights.items()
            },
            "optimizer": states,
            "train_state": {"step": torch.tensor(2)},
        }
        dist_cp.save(state, checkpoint_id=f"{folder}/{case}/step-2")
        if dist.get_rank():
            continue

        # Write what torchtitan itself makes of them.
        path = Path(folder) / case
        converted = adapter(settings, None).to_hf(dict(weights))
        save_file(
            {name: weight.contiguous().clone() for name, weight in converted.items()},
            path / "to_hf.safetensors",
            metadata={"format": "pt"},
        )
        config = {
            "hidden_size": DIM,
            "num_hidden_layers": len(settings.layers),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD,
            "intermediate_size": 48,
            "vocab_size": N_TOKENS,
            "rope_theta": 10000.0,
            "rms_norm_eps": settings.norm.eps,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            "tie_word_embeddings": settings.enable_weight_tying,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **names,
        }
        (path / "config.json").write_text(json.dumps(config, indent=1))
        if case == "llama":
            tokens = torch.randint(0, N_TOKENS, (1, 12), generator=generator)
            positions = torch.arange(12)[None]
            for layer in model.layers.values():
                layer.attention.inner_attention = CausalAttention()
            with torch.no_grad():
                logits = model(tokens, positions=positions)
            torch.save({"tokens": tokens, "logits": logits}, path / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
