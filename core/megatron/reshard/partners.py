"""Tensors that go together; they are checked because comparing layers with each other misses what
all of them lack.

A layer with one of these has the other::

    self_attention.linear_qkv.weight    self_attention.linear_proj.weight
    mlp.linear_fc1.weight               mlp.linear_fc2.weight            (of experts and shared experts as well)
    mlp.experts.*                       mlp.router.weight
    a norm before attention             a norm before the MLP

and a stack of GPT layers whose norms are tensors ends with a norm of its own.

Source: Megatron-LM d98e8a64 ``core/transformer/attention.py``, ``mlp.py``, ``moe/moe_layer.py``,
``transformer_block.py``; tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.errors import MissingShardError, Report
from core.megatron.model.checks import ADAPTER
from core.megatron.rules.rules import GPT, Layer, ModelKind, Rules

_PARTNERS = (
    ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"),
    ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
    ("mlp.experts.weight1", "mlp.experts.weight2"),
)
_EXPERT = "mlp.experts."
_ROUTER = "mlp.router.weight"
_FIRST, _SECOND = "linear_fc1.weight", "linear_fc2.weight"
_FINAL = "decoder.final_layernorm.weight"
_QKV = "self_attention.linear_qkv.weight"
_ATTENTION_NORMS = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_MLP_NORM = "pre_mlp_layernorm.weight"
_NORM = "layernorm.weight"
_FUSED_NORM = "layer_norm_weight"


def check_partners(names: Iterable[str], kind: ModelKind, rules: Rules, *, report: Report) -> None:
    """Report tensors that are missing in all layers of a stack, though each layer has their
    partner.

    Args:
        names: names of the model's tensors, one for each layer.
        kind: what the parts of such a model are called.
        report: takes the missing tensors (rule ``layout.tensor``).
    """
    present = set(names)
    if kind is not GPT or any(ADAPTER in name or "to_wrap" in name for name in present):
        return

    # Collect the names of each layer, and of each stack.
    layers: dict[tuple[str, int], set[str]] = {}
    subs_of_stack: dict[str, set[str]] = {}
    for name in present:
        layer = rules.layer_of(name)
        if layer is not None:
            layers.setdefault((layer.stack, layer.number), set()).add(layer.sub)
            subs_of_stack.setdefault(layer.stack, set()).add(layer.sub)

    for (stack, number), subs in sorted(layers.items()):
        for missing, partner in _missing(subs):
            if (
                missing not in subs_of_stack[stack]
            ):  # where other layers have it, ``check_complete`` reports it
                problem = f"the layer has {partner}, but not this"
                report(
                    MissingShardError(
                        problem, key=str(Layer(stack, number, missing)), rule="layout.tensor"
                    )
                )

    # A stack whose layers have norms ends with one.
    has_norms = any(
        sub.endswith((_NORM, _FUSED_NORM)) for subs in subs_of_stack.values() for sub in subs
    )
    if has_norms and not any(name.startswith("decoder.final") for name in present):
        report(
            MissingShardError(
                "the tensor is not in the checkpoint", key=_FINAL, rule="layout.tensor"
            )
        )


def _missing(subs: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (missing tensor, its partner) of a layer."""
    for pair in _PARTNERS:
        for present, missing in (pair, pair[::-1]):
            if present in subs and missing not in subs:
                yield missing, present
    yield from _missing_norms(subs)
    experts = sorted(sub for sub in subs if sub.startswith(_EXPERT))
    if experts and _ROUTER not in subs:
        yield _ROUTER, experts[0]
    for sub in experts:
        for present, missing in ((_FIRST, _SECOND), (_SECOND, _FIRST)):
            if present in sub and sub.replace(present, missing) not in subs:
                yield sub.replace(present, missing), sub


def _missing_norms(subs: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (missing norm, the norm that the layer has).

    Attention and MLP both begin with a norm, which may be fused into the first linear, or neither
    does.
    """
    mlp = {sub for sub in subs if sub.startswith("mlp.")}
    if _QKV not in subs or not mlp:
        return
    norms_of_mlp = {sub for sub in mlp if sub.endswith("linear_fc1." + _FUSED_NORM)} | (
        {_MLP_NORM} & subs
    )
    before = next((sub for sub in _ATTENTION_NORMS if sub in subs), None)
    if before is not None and not norms_of_mlp:
        yield _MLP_NORM, before
    elif norms_of_mlp and before is None:
        yield _ATTENTION_NORMS[0], min(norms_of_mlp)
