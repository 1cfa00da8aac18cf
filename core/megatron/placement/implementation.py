"""The names of a model's modules under the other transformer implementation: the arithmetic is the same.

Megatron's ``local`` implementation has norms of their own, Transformer Engine's are part of the linear that follows::

    local                                     transformer_engine
    input_layernorm.weight                    self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight  (dense layers)  mlp.linear_fc1.layer_norm_weight
    self_attention.q_layernorm.weight  (MLA)  self_attention.linear_q_up_proj.layer_norm_weight

A layer with experts keeps ``pre_mlp_layernorm`` in both, and a latent attention its ``input_layernorm``. torch_dist has
the fused names for both, except that the local implementation's map renames the norm before experts as well, so that
such a checkpoint loads only where it was saved.

Source: megatron-core 0.16.1 ``models/gpt/gpt_layer_specs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.catalog.facets import MegatronModel
from core.catalog.optimizer_keys import Optimizer, state_key, state_of
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, common_of
from core.megatron.model.args import facts_of, fields_of, replaced
from core.megatron.model.facts import Facts
from core.megatron.rules.rules import Rules

_ATTENTION = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_LATENT = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


def with_implementation(catalog: Catalog, implementation: str, *, rules: Rules) -> Catalog:
    """The global per-layer form under the names of another implementation.

    Extra states that hold something belong to one implementation and are left out, with a note.

    Args:
        catalog: what ``core.megatron.reshard.reshard.unshard`` gives.
        implementation: ``local`` or ``transformer_engine``.

    Raises:
        UnsupportedError: experts are in a form that the other implementation does not have.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.is_local == (implementation == "local"):
        return catalog
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "models with the names of megatron.legacy have no such implementation", hint="leave --transformer-impl out"
        )
    model = catalog.facet(MegatronModel) or MegatronModel()
    to_fused = implementation != "local"
    if model.expert_names == "te_grouped" and not to_fused:
        raise UnsupportedError(
            "the local implementation has no grouped experts as Transformer Engine keeps them",
            hint="leave --transformer-impl out",
        )
    dropped = list(catalog.dropped)

    def renamed(name: str) -> str:
        found = state_of(name)
        if found is not None:
            return state_key(found[0], renamed(found[1]))
        layer = rules.layer_of(name)
        if layer is None:
            return name
        pairs = _pairs(facts, layer.number, is_main=layer.stack in facts.kind.stacks)
        for local, fused in pairs:
            old, new = (local, fused) if to_fused else (fused, local)
            if layer.sub.startswith(old):
                return str(replace(layer, sub=new + layer.sub.removeprefix(old)))
        return name

    new_of = {key: renamed(key) for key in catalog.tensors if not _is_state(key, catalog, dropped)}
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
        tensors={new: _meta(catalog, old, new) for old, new in new_of.items()},
        objects={key: item for key, item in catalog.objects.items() if not _holds_state(item, dropped)},
        fragments_of=fragments_of,
        args=args,
        common={**common_of(catalog), "args": args},
        optimizer=None if optimizer is None else _with_names(optimizer, new_of),
        dropped=tuple(dropped),
    ).with_facet(replace(model, order=None, module_versions={}, is_down_proj_cut=facts.is_mla and not to_fused))


def _pairs(facts: Facts, layer: int, *, is_main: bool) -> list[tuple[str, str]]:
    """(local, fused) beginnings of the names in a layer."""
    pairs = list(_LATENT) if facts.is_mla else [_ATTENTION]
    has_experts = layer in facts.moe_layers if is_main else bool(facts.moe_layers)
    return pairs if has_experts else [*pairs, _MLP]


def _is_state(key: str, catalog: Catalog, dropped: list[str]) -> bool:
    """Whether a tensor is an extra state; notes one that holds something."""
    if not key.endswith(EXTRA_STATE):
        return False
    if catalog.tensors[key].n_elements:
        dropped.append(f"{key} (of the other transformer implementation)")
    return True


def _holds_state(item: StoredObject, dropped: list[str]) -> bool:
    """Whether an object is an extra state that holds something; notes it."""
    if not item.key.endswith(EXTRA_STATE) or (item.value is None and item.raw_key is None):
        return False
    dropped.append(f"{item.key} (of the other transformer implementation)")
    return True


def _meta(catalog: Catalog, old: str, new: str) -> TensorMeta:
    return replace(catalog.tensors[old], key=new)


def _with_names(optimizer: Optimizer, new_of: dict[str, str]) -> Optimizer:
    """The optimizer whose groups name the parameters anew."""
    groups = tuple(
        replace(group, params=None if group.params is None else tuple(new_of.get(name, name) for name in group.params))
        for group in optimizer.groups
    )
    return replace(optimizer, groups=groups)
