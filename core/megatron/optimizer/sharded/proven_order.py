"""The order of parameters in the optimizer's buffers: that of the implementation that saved.

Norms are modules of their own in Megatron's local implementation, and parts of the linears that
follow in Transformer Engine's (``core.megatron.placement.implementation``), so a layer's parameters
have another order. torch_dist has the same keys for both. Megatron's arguments record the
implementation; those that are derived from other files may not, or state another one::

    transformer_engine   linear_proj, linear_qkv.layer_norm, linear_qkv, fc1.layer_norm, fc1, fc2
    local                input_layernorm, linear_proj, linear_qkv, pre_mlp_layernorm, fc1, fc2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.flat.layout import HINT, UNPROVEN
from core.megatron.placement.implementation import with_implementation
from core.megatron.rules.rules import Rules

Read = Callable[[Catalog, ModelFacts], Catalog]


def read_in_proven_order(model: Catalog, facts: ModelFacts, rules: Rules, *, read: Read) -> Catalog:
    """Return a model with its optimizer out of buffers, in the only order that the values prove.

    Args:
        model: the global per-layer form of the weights, under the names that the arguments state.
        facts: facts about the run that saved.
        read: adds the optimizer to a model, in the order of its implementation's parameters; raises
            ``UNPROVEN`` if master weights do not round to weights there.

    Raises:
        UnsupportedError: no order fits, or two fit and the arguments record neither.
        CheckpointingException: as for ``read``.
    """
    stated, other = "transformer_engine", "local"
    if facts.is_local:
        stated, other = other, stated
    failure: UnsupportedError | None = None
    try:
        in_stated = read(model, facts)
        if "transformer_impl" in fields_of(model.args):
            return in_stated
    except UnsupportedError as err:
        if err.rule != UNPROVEN:
            raise
        failure = err

    # Some models have parameters in one implementation only.
    try:
        renamed = with_implementation(model, other, rules=rules)
    except UnsupportedError:
        if failure is not None:
            raise failure from None
        return in_stated

    # One order must fit; if both do, every state must be in the same place.
    try:
        in_other = read(renamed, replace(facts, is_local=not facts.is_local))
    except CheckpointingException as err:
        if failure is None:
            return in_stated
        raise UnsupportedError(
            f"no parameter order fits the optimizer's buffers: with transformer_impl {stated}, "
            f"{failure.message}; with {other}, {err.message}",
            hint=HINT,
            rule=UNPROVEN,
        ) from None
    if failure is not None:
        note = "the only value that explains the parameter order in the optimizer's buffers"
        return in_other.noted([f"assuming transformer_impl {other}, {note}"])
    again = with_implementation(in_other, stated, rules=rules)
    differing = [
        key for key in in_stated.tensors if in_stated.fragments(key) != again.fragments(key)
    ]
    if differing:
        raise UnsupportedError(
            f"the optimizer's buffers fit two parameter orders, with transformer_impl {stated} and "
            f"with {other}, and the training arguments do not say which one is right",
            key=differing[0],
            hint=HINT,
        )
    return in_stated
