"""Tensors that go together: where every layer lacks the same one, comparing layers among themselves tells nothing.

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
_FINAL = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
_QKV = "self_attention.linear_qkv.weight"
_ATTENTION_NORMS = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_MLP_NORM = "pre_mlp_layernorm.weight"
_NORM = "layernorm.weight"
_FUSED_NORM = "layer_norm_weight"


def check_partners(names: Iterable[str], kind: ModelKind, rules: Rules, *, report: Report) -> None:
    """Names what is absent in all layers of a stack, for the layers that ought to have it.

    Args:
        names: of the model's tensors, one for each layer.
        kind: what the parts of such a model are called.
        report: takes what is absent (rule ``layout.tensor``).
    """
    present = set(names)
    if kind is not GPT or any(ADAPTER in name or "to_wrap" in name for name in present):
        return
    layers: dict[tuple[str, int], set[str]] = {}
    for name in present:
        found = rules.layer_of(name)
        if found is not None:
            layers.setdefault((found.stack, found.number), set()).add(found.sub)
    every = {(stack, sub) for (stack, _), subs in layers.items() for sub in subs}
    for (stack, number), subs in sorted(layers.items()):
        for absent, other in _absent(subs):
            if (stack, absent) in every:
                continue  # other layers have it, which ``check_complete`` says
            what = f"the layer has {other}, but not this"
            report(MissingShardError(what, key=str(Layer(stack, number, absent)), rule="layout.tensor"))
    norms = any(sub.endswith((_NORM, _FUSED_NORM)) for (stack, _), subs in layers.items() for sub in subs)
    if norms and not present & set(_FINAL) and not any(name.startswith("decoder.final") for name in present):
        report(MissingShardError("the tensor is not in the checkpoint", key=_FINAL[0], rule="layout.tensor"))


def _absent(subs: set[str]) -> Iterator[tuple[str, str]]:
    """What a layer lacks, with what tells so."""
    for pair in _PARTNERS:
        for there, absent in (pair, pair[::-1]):
            if there in subs and absent not in subs:
                yield absent, there
    yield from _absent_norms(subs)
    experts = sorted(sub for sub in subs if sub.startswith(_EXPERT))
    if experts and _ROUTER not in subs:
        yield _ROUTER, experts[0]
    for sub in experts:
        for there, absent in ((_FIRST, _SECOND), (_SECOND, _FIRST)):
            if there in sub and sub.replace(there, absent) not in subs:
                yield sub.replace(there, absent), sub


def _absent_norms(subs: set[str]) -> Iterator[tuple[str, str]]:
    """Attention and MLP both begin with a norm, fused into their first linear or not, or neither does."""
    if _QKV not in subs or not any(sub.startswith("mlp.") for sub in subs):
        return
    before = next((sub for sub in _ATTENTION_NORMS if sub in subs), None)
    after = next(
        (
            sub
            for sub in subs
            if sub == _MLP_NORM or (sub.startswith("mlp.") and sub.endswith("linear_fc1." + _FUSED_NORM))
        ),
        None,
    )
    if before is not None and after is None:
        yield _MLP_NORM, before
    elif after is not None and before is None:
        yield _ATTENTION_NORMS[0], after
