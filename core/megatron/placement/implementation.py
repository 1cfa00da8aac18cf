"""Rename a model's modules for the other transformer implementation, which computes the same.

The norms of Megatron's ``local`` implementation are modules of their own; Transformer Engine's are
part of the linear that follows::

    local                                     transformer_engine
    input_layernorm.weight                    self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight  (dense layers)  mlp.linear_fc1.layer_norm_weight
    self_attention.q_layernorm.weight  (MLA)  self_attention.linear_q_up_proj.layer_norm_weight

In both, a layer with experts has ``pre_mlp_layernorm``, and multi-latent attention (MLA)
``input_layernorm``. torch_dist has the fused names for both, but the local implementation's map
renames the norm before experts as well: such a checkpoint loads only in that implementation.

Source: megatron-core 0.16.1 ``models/gpt/gpt_layer_specs.py``.
"""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import dropped_each
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.optimizer_keys import Optimizer, split_state_key, state_key
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, get_common_state
from core.megatron.extras.extra_states import states_of_rank_files
from core.megatron.extras.nested_dicts import drop_versions
from core.megatron.model.args import parse_facts, replaced
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import Rules

_ATTENTION = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_LATENT = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


def with_implementation(catalog: Catalog, implementation: str, *, rules: Rules) -> Catalog:
    """Return the global per-layer form under the names of another implementation.

    Extra states that are not empty belong to one implementation and are dropped, with a note.

    Args:
        catalog: the result of ``core.megatron.reshard.unshard.unshard``.
        implementation: ``local`` or ``transformer_engine``.

    Raises:
        UnsupportedError: a model of megatron.legacy, or experts in a form that the other
            implementation does not have.
    """
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.is_local == (implementation == "local"):
        return catalog
    model = catalog.facet(MegatronModel) or MegatronModel()
    to_fused = implementation != "local"

    # The other implementation must have such a model.
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "megatron.legacy models have only one transformer implementation",
            hint="remove --transformer-impl",
        )
    if model.expert_names == "te_grouped" and not to_fused:
        raise UnsupportedError(
            "the local implementation does not support Transformer Engine's grouped experts",
            hint=f"add {OPTION} sequential or {OPTION} grouped, or remove --transformer-impl",
        )

    # Rename the tensors. Extra states that are tensors are all dropped, but only filled ones noted:
    # an empty one is the same as none.
    filled_states = [
        key
        for key, tensor in catalog.tensors.items()
        if key.endswith(EXTRA_STATE) and tensor.n_elements
    ]
    filled_states += [
        key
        for key, item in catalog.objects.items()
        if item.key.endswith(EXTRA_STATE) and (item.value is not None or item.raw_key is not None)
    ]
    catalog = drop_versions(catalog)
    new_of = {
        key: _renamed(key, facts, rules, to_fused=to_fused)
        for key in catalog.tensors
        if not key.endswith(EXTRA_STATE)
    }

    # Transformer Engine's norms have states, too, which are empty in the other implementation.
    objects = {key: item for key, item in catalog.objects.items() if key not in filled_states}
    if to_fused:
        parameters = (new for old, new in new_of.items() if split_state_key(old) is None)
        objects |= {
            state: StoredObject(state)
            for state in states_of_rank_files(parameters)
            if state not in objects
        }

    # Older runs do not record the implementation, so the argument may have to be added.
    args = replaced(catalog.args, {}, added={"transformer_impl": implementation})
    optimizer = catalog.optimizer
    return replace(
        catalog,
        tensors={new: catalog.tensors[old] for old, new in new_of.items()},
        objects=objects,
        args=args,
        common={**get_common_state(catalog), "args": args},
        optimizer=None if optimizer is None else _with_names(optimizer, new_of),
        dropped=(
            *catalog.dropped,
            *dropped_each(
                filled_states, "specific to the other transformer implementation", catalog.tensors
            ),
        ),
    ).with_facet(
        replace(
            model, order=None, module_versions={}, is_down_proj_cut=facts.is_mla and not to_fused
        )
    )


def _renamed(key: str, facts: ModelFacts, rules: Rules, *, to_fused: bool) -> str:
    """Return the key of a tensor or an optimizer's state in the other implementation."""
    state = split_state_key(key)
    if state is not None:
        return state_key(state[0], _renamed(state[1], facts, rules, to_fused=to_fused))
    layer = rules.layer_of(key)
    if layer is None:
        return key

    # A layer with experts keeps its norm; so does multi-token prediction if any layer has experts.
    pairs = list(_LATENT) if facts.is_mla else [_ATTENTION]
    is_main = layer.stack in facts.kind.stacks
    if not (layer.number in facts.moe_layers if is_main else facts.moe_layers):
        pairs.append(_MLP)
    blocks = facts.blocks_of(layer.stack, layer.number)
    own = [] if blocks is None else blocks.linear_norm_names()
    for local, fused in (*own, *pairs):
        old, new = (local, fused) if to_fused else (fused, local)
        if layer.sub.startswith(old):
            return str(replace(layer, sub=new + layer.sub.removeprefix(old)))
    return key


def _with_names(optimizer: Optimizer, new_of: dict[str, str]) -> Optimizer:
    """Return the optimizer with the parameters in its groups renamed."""
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
