"""Check tensors that occur only together.

Comparing the layers of a model with each other misses a tensor that all of them lack. A layer that
has one of these tensors has the other::

    self_attention.linear_qkv.weight    self_attention.linear_proj.weight
    mlp.linear_fc1.weight               mlp.linear_fc2.weight    (also in experts, shared experts)
    mlp.experts.*                       mlp.router.weight
    a norm before attention             a norm before the MLP

A stack of GPT layers whose norms are tensors ends with a final norm. Towers of Megatron's layers
have these pairs as well, numbered or stacked, and a projection to the size of the text model.

Source: Megatron-LM d98e8a64 ``core/transformer/attention.py``, ``mlp.py``, ``moe/moe_layer.py``,
``transformer_block.py``, ``models/multimodal/llava_model.py``; Megatron-Bridge 067f987d
``models/*/modeling_*.py``; tests/golden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from core.errors import MissingShardError, Report
from core.megatron.model.checks import ADAPTER, TOWERS
from core.megatron.rules.rules import GPT, Layer, ModelKind, Rules

_PARTNERS = (
    ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"),
    ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
    ("mlp.experts.weight1", "mlp.experts.weight2"),
)
_IN_TOWERS = (
    (".linear_qkv.weight", ".linear_proj.weight"),
    (".linear_fc1.weight", ".linear_fc2.weight"),
    (".linear_fc1.bias", ".linear_fc2.bias"),
    (".self_attention.linear_proj.bias", ".mlp.linear_fc2.bias"),
    (".input_layernorm.weight", ".pre_mlp_layernorm.weight"),
    (".input_layernorm.bias", ".pre_mlp_layernorm.bias"),
    (".self_attention.linear_qkv.layer_norm_weight", ".mlp.linear_fc1.layer_norm_weight"),
    (".self_attention.linear_qkv.layer_norm_bias", ".mlp.linear_fc1.layer_norm_bias"),
)
"""Ends of the names of tensors of a tower that occur only together."""
_TOWER, _PROJECTION, _MERGER = "vision_model.", "vision_projection.", "vision_model.merger."
"""Beginnings of the names of a tower of Megatron's layers and of its projection: that of
Megatron-LM's LLaVA, or that of Megatron-Bridge's models."""
_NUMBER = re.compile(r"\.\d+\.")
_EXPERT = "mlp.experts."
_ROUTER = "mlp.router.weight"
_FIRST, _SECOND = "linear_fc1.weight", "linear_fc2.weight"
_FINAL = "decoder.final_layernorm.weight"
_QKV = "self_attention.linear_qkv.weight"
_ATTENTION_NORMS = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_MLP_NORM = "pre_mlp_layernorm.weight"
_MLP_NORMS = re.compile(rf"{re.escape(_MLP_NORM)}$|mlp\.(.*linear_fc1\.)?layer_norm_weight$")
_ANY_NORM = re.compile(r"(layernorm\.|layer_norm_)weight$")
_WRAPPED = re.compile(rf"{re.escape(ADAPTER)}|to_wrap")


def check_partners(names: Iterable[str], kind: ModelKind, rules: Rules, *, report: Report) -> None:
    """Report tensors that all layers of a stack lack although they have the tensor's partner.

    Args:
        names: names of the model's tensors, one for each layer.
        kind: the kind of model; only GPT models are checked.
        report: takes the missing tensors (rule ``layout.tensor``).
    """
    present = set(names)

    # Adapters rename or replace the linears that they wrap, so nothing can be expected of those.
    if kind is not GPT or any(map(_WRAPPED.search, present)):
        return

    # Collect the names of each layer, and of each stack.
    layers: dict[tuple[str, int], set[str]] = {}
    subs_of_stack: dict[str, set[str]] = {}
    for layer in filter(None, map(rules.layer_of, present)):
        layers.setdefault((layer.stack, layer.number), set()).add(layer.sub)
        subs_of_stack.setdefault(layer.stack, set()).add(layer.sub)

    # A tensor that some other layer has is left to ``check_complete``, which compares layers.
    for (stack, number), subs in sorted(layers.items()):
        for missing, partner in _missing_partners(subs):
            if missing not in subs_of_stack[stack]:
                problem = f"the layer has {partner}, but not this tensor"
                key = str(Layer(stack, number, missing))
                report(MissingShardError(problem, key=key, rule="layout.tensor"))

    for missing, partner in _missing_in_towers({n for n in present if n.startswith(TOWERS)}):
        problem = f"it is not in the checkpoint, which has {partner}"
        report(MissingShardError(problem, key=missing, rule="layout.tensor"))

    # A stack whose layers have norms ends with one.
    has_norms = any(map(_ANY_NORM.search, set().union(*subs_of_stack.values())))
    if has_norms and not any(name.startswith("decoder.final") for name in present):
        problem = "the tensor is not in the checkpoint"
        report(MissingShardError(problem, key=_FINAL, rule="layout.tensor"))


def _missing_partners(subs: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (missing tensor, its partner) for the names in a layer."""
    for pair in _PARTNERS:
        for present, missing in (pair, pair[::-1]):
            if present in subs and missing not in subs:
                yield missing, present
    yield from _missing_norms(subs)

    # Experts need a router, and each of them both linears.
    experts = sorted(sub for sub in subs if sub.startswith(_EXPERT))
    if experts and _ROUTER not in subs:
        yield _ROUTER, experts[0]
    for sub in experts:
        for partner in (sub.replace(_FIRST, _SECOND), sub.replace(_SECOND, _FIRST)):
            if partner not in subs:
                yield partner, sub


def _missing_in_towers(names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (missing tensor or part of a tower, its partner) for the names in towers."""
    # What some layer has is left to ``check_complete``, too.
    in_any_layer = {_NUMBER.sub(".", name) for name in names}
    for name in sorted(names):
        for pair in _IN_TOWERS:
            for present, missing in (pair, pair[::-1]):
                absent = name.removesuffix(present) + missing
                if name.endswith(present) and _NUMBER.sub(".", absent) not in in_any_layer:
                    yield absent, name
    has_projection = any(name.startswith((_PROJECTION, _MERGER)) for name in names)
    in_tower = min((name for name in names if name.startswith(_TOWER)), default=None)
    if in_tower is not None and not has_projection:
        yield _PROJECTION.rstrip("."), in_tower
    elif in_tower is None and has_projection:
        yield _TOWER.rstrip("."), min(name for name in names if name.startswith(_PROJECTION))


def _missing_norms(subs: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (missing norm, the norm that the layer has).

    Attention and MLP either both begin with a norm, which may be fused into the first linear, or
    neither does.
    """
    if _QKV not in subs or not any(sub.startswith("mlp.") for sub in subs):
        return
    attention_norm = next((sub for sub in _ATTENTION_NORMS if sub in subs), None)
    mlp_norm = min(filter(_MLP_NORMS.match, subs), default=None)
    if attention_norm is not None and mlp_norm is None:
        yield _MLP_NORM, attention_norm
    elif mlp_norm is not None and attention_norm is None:
        yield _ATTENTION_NORMS[0], mlp_norm
