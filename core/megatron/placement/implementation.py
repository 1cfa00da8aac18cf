"""Renaming of a model's modules for the other transformer implementation, whose arithmetic is the
same.

Megatron's ``local`` implementation has norms of their own; Transformer Engine's are part of the linear that follows::

    local                                     transformer_engine
    input_layernorm.weight                    self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight  (dense layers)  mlp.linear_fc1.layer_norm_weight
    self_attention.q_layernorm.weight  (MLA)  self_attention.linear_q_up_proj.layer_norm_weight

A layer with experts keeps ``pre_mlp_layernorm`` in both, and a latent attention its
``input_layernorm``. torch_dist has the fused names for both, except that the local implementation's
map renames the norm before experts as well, so that such a checkpoint loads only where it was
saved.

Source: megatron-core 0.16.1 ``models/gpt/gpt_layer_specs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, Fragment
from core.catalog.facets import MegatronModel
from core.catalog.optimizer_keys import Optimizer, state_key, state_of
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, common_of
from core.megatron.model.args import facts_of, fields_of, replaced
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.rules import Rules

_ATTENTION = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_LATENT = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


def with_implementation(catalog: Catalog, implementation: str, *, rules: Rules) -> Catalog:
    """Return the global per-layer form under the names of another implementation.

    Extra states that hold something belong to one implementation and are left out, with a note.

    Args:
        catalog: the result of ``core.megatron.reshard.reshard.unshard``.
        implementation: ``local`` or ``transformer_engine``.

    Raises:
        UnsupportedError: experts are in a form that the other implementation does not have.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.is_local == (implementation == "local"):
        return catalog
    model = catalog.facet(MegatronModel) or MegatronModel()
    to_fused = implementation != "local"
    _check_convertible(facts, model, to_fused=to_fused)

    # Extra states stay behind: only empty ones mean the same in both.
    states = [key for key in catalog.tensors if key.endswith(EXTRA_STATE)]
    filled = [key for key in states if catalog.tensors[key].n_elements]
    filled_objects = [
        key
        for key, item in catalog.objects.items()
        if item.key.endswith(EXTRA_STATE) and (item.value is not None or item.raw_key is not None)
    ]
    dropped = [
        f"{key} (of the other transformer implementation)" for key in (*filled, *filled_objects)
    ]

    new_of = {
        key: _renamed(key, facts, rules, to_fused=to_fused)
        for key in catalog.tensors
        if not key.endswith(EXTRA_STATE)
    }
    old_of = {new: old for old, new in new_of.items()}

    def fragments_of(key: str) -> Sequence[Fragment]:
        old = old_of.get(key)
        if old is None or old == key:
            return catalog.fragments(key)
        return tuple(replace(piece, key=key) for piece in catalog.fragments(old))

    args = replaced(catalog.args, {})
    fields_of(args)["transformer_impl"] = implementation  # also where an older run did not state it
    optimizer = catalog.optimizer
    return replace(
        catalog,
        tensors={new: replace(catalog.tensors[old], key=new) for old, new in new_of.items()},
        objects={key: item for key, item in catalog.objects.items() if key not in filled_objects},
        fragments_of=fragments_of,
        args=args,
        common={**common_of(catalog), "args": args},
        optimizer=None if optimizer is None else _with_names(optimizer, new_of),
        dropped=(*catalog.dropped, *dropped),
    ).with_facet(
        replace(
            model, order=None, module_versions={}, is_down_proj_cut=facts.is_mla and not to_fused
        )
    )


def _check_convertible(facts: ModelFacts, model: MegatronModel, *, to_fused: bool) -> None:
    """Raise unless the other implementation has such a model.

    Raises:
        UnsupportedError: names of megatron.legacy, or Transformer Engine's grouped experts.
    """
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "models with the names of megatron.legacy have no such implementation",
            hint="leave --transformer-impl out",
        )
    if model.expert_names == "te_grouped" and not to_fused:
        raise UnsupportedError(
            "the local implementation has no grouped experts as Transformer Engine keeps them",
            hint="leave --transformer-impl out",
        )


def _renamed(key: str, facts: ModelFacts, rules: Rules, *, to_fused: bool) -> str:
    """Return the key of a tensor, or of an optimizer's state, under the names of the other
    implementation.
    """
    state = state_of(key)
    if state is not None:
        return state_key(state[0], _renamed(state[1], facts, rules, to_fused=to_fused))
    layer = rules.layer_of(key)
    if layer is None:
        return key
    pairs = list(_LATENT) if facts.is_mla else [_ATTENTION]
    is_main = layer.stack in facts.kind.stacks
    if not (layer.number in facts.moe_layers if is_main else facts.moe_layers):
        pairs.append(_MLP)  # a layer with experts keeps its norm
    for local, fused in pairs:
        old, new = (local, fused) if to_fused else (fused, local)
        if layer.sub.startswith(old):
            return str(replace(layer, sub=new + layer.sub.removeprefix(old)))
    return key


def _with_names(optimizer: Optimizer, new_of: dict[str, str]) -> Optimizer:
    """Return the optimizer with new names of the parameters in its groups."""
    groups = tuple(
        replace(
            group,
            params=None
            if group.params is None
            else tuple(new_of.get(name, name) for name in group.params),
        )
        for group in optimizer.groups
    )
    return replace(optimizer, groups=groups)
