"""The linear layers that adapters belong to, and the adapters' names and shapes on both sides.

For a rank r, Megatron-Bridge has two forms, and a model has one of them::

    peft                             LoRA                             CanonicalLoRA
    q_proj.lora_A     (r, in)        linear_qkv.adapter               linear_qkv.adapter
    q_proj.lora_B     (q, r)           .linear_in.weight  (r, in)       .adapter_q.linear_in.weight
    k_proj.lora_A …                    .linear_out.weight (q+k+v, r)    .adapter_q.linear_out.weight
    v_proj.lora_A …                                                     .adapter_k.… .adapter_v.…
    gate_proj, up_proj               linear_fc1.adapter.…             .adapter_gate.… .adapter_up.…
    o_proj, down_proj                linear_proj, linear_fc2: .adapter.linear_in, .linear_out

The second matrix has the rows of the layer, so it is fused and split as the layer's weight is. The
first has no such rows: all layers that Megatron fuses share one, as they are trained in LoRA. So an
adapter whose first matrices differ, or which leaves out k_proj, has only the form of CanonicalLoRA.

Layers of experts are not adapted (below), and neither are embeddings and output layers, whose rows
Megatron pads.

Not supported: adapters of experts, of linear attention and of Mamba layers in CanonicalLoRA.

Source: Megatron-Bridge 067f987d ``models/conversion/peft_bridge.py`` (which only exports),
``peft/{lora,canonical_lora,utils}.py``; checkpoints that it wrote (tests/golden).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.hf.family import Family
from core.hf.name_tables import FamilyPart, Pair, pairs_of
from core.hf.traits import Model

ADAPTER = ".adapter."
"""Follows the name of the layer in the names of its adapter."""
LINEAR_IN, LINEAR_OUT = "linear_in.weight", "linear_out.weight"
WEIGHT = ".weight"
MAX_LAYERS = 1 << 14
"""Maximum number of layers of a model; an adapter has tensors only of those that it adapts."""
CANONICAL = {
    "q_proj": "adapter_q",
    "k_proj": "adapter_k",
    "v_proj": "adapter_v",
    "gate_proj": "adapter_gate",
    "up_proj": "adapter_up",
}
"""Module of a Hugging Face model → name of its adapter in CanonicalLoRA."""
_PADDED = ("embedding.", "output_layer.", "lm_head.")


def adapted_pairs(family: Family, model: Model) -> Iterator[Pair]:
    """Yield the weights of a model that may have adapters, in the order of Megatron's files."""
    for pair in pairs_of(family, replace(model, n_experts=0)):
        is_matrix = pair.names[0].endswith(WEIGHT) and len(pair.shape) == 2
        if is_matrix and not pair.names[0].startswith(_PADDED) and not pair.is_swapped:
            yield pair


def linear_layers_of(pair: Pair) -> tuple[FamilyPart, ...]:
    """Return the layers that a weight consists of, with their weights' shapes as (out, in).

    That is the order of an adapter's matrices even where the weight is stored as (in, out).
    """
    return replace(pair, is_transposed=False).tensors


def module_of(name: str) -> str:
    """Return the last part of the module's name, given the name of its weight."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]
