"""Saves a Llama of torchtitan after three steps, and what the same run makes of two more.

    torchrun --nproc-per-node 2 torchtitan_run.py FOLDER

The batches, the optimizer and truth.pt are those of llama_runs.py, and the model is cut by FSDP2.
The names in truth.pt are those of transformers: torchtitan's own hook and adapter convert the
weights, and the moments as if they were weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from llama_runs import N_MORE, N_SAVED, STATES, VOCABULARY, adam, tokens_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan_names import CausalAttention

DIM, HEADS, GROUPS, FFN = 16, 4, 2, 24
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True)


def settings() -> Any:
    weight, norm = {"weight": torch.nn.init.normal_}, {"weight": torch.nn.init.ones_}
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=DIM,
        hidden_dim=FFN,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=128, theta=10000.0),
        attn_backend="flex",
    )
    return llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=weight
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=norm),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=weight),
    )


def in_transformers_names(model: Any, config: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict whose query, key and value are fused, with torchtitan's own code."""
    for name, module in model.named_modules():
        if name.endswith("qkv_linear"):
            module._split_qkv_on_save(module, state, f"{name}.", {})
    return {
        name: tensor.contiguous().clone()
        for name, tensor in Llama3StateDictAdapter(config, None).to_hf(state).items()
    }


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    config = settings()
    model = config.build()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1)
        for layer in model.layers.values():
            layer.attention.inner_attention = CausalAttention()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model)

    def trained(steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = tokens_of(step)
            logits = model(tokens, positions=torch.arange(tokens.shape[1])[None])
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        return losses

    trained(range(N_SAVED))
    state = {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "train_state": {"step": torch.tensor(N_SAVED)},
    }
    dist_cp.save(state, checkpoint_id=f"{folder}/step-{N_SAVED}")

    # Gather the parameters and moments, and give them the names of transformers.
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    values = {"fp32": {name: p.full_tensor().detach() for name, p in model.named_parameters()}}
    values |= {
        kind: {name: optimizer_state[name][kind] for name in optimizer_state} for kind in STATES
    }
    losses = trained(range(N_SAVED, N_SAVED + N_MORE))
    if dist.get_rank() == 0:
        named = {
            kind: in_transformers_names(model, config, dict(of)) for kind, of in values.items()
        }
        states = {name: {kind: named[kind][name] for kind in named} for name in named["fp32"]}
        torch.save({"states": states, "losses": losses}, Path(folder) / "truth.pt")
        text = json.dumps({
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": DIM // HEADS,
            "intermediate_size": FFN,
            "vocab_size": VOCABULARY,
            "rope_theta": 10000.0,
            "rms_norm_eps": config.norm.eps,
            "max_position_embeddings": 8,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }, indent=1)  # fmt: skip
        (Path(folder) / "config.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
