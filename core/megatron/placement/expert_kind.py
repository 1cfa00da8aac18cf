"""Change the module of a model's experts, and keep the arguments that select it.

===============  ==================================  ==============================================
 kind             module                              arguments of Megatron
===============  ==================================  ==============================================
 ``sequential``   SequentialMLP, one module each      no ``--moe-grouped-gemm``
 ``te-grouped``   TEGroupedMLP                        ``--moe-grouped-gemm``, Transformer Engine
 ``grouped``      GroupedMLP, until megatron-core     ``--moe-grouped-gemm`` with the local
                  0.16                                implementation, or also
                                                      ``--moe-use-legacy-grouped-gemm``
===============  ==================================  ==============================================

The global form is the same for all (``core.megatron.rules.experts``), so this changes facts only:
arguments, the form of the names in rank files, and extra states. Data are cut later.

Source: megatron-core 0.16.1 ``models/gpt/moe_module_specs.py``, ``models/backends.py``,
``transformer/moe/experts.py``.

Not supported: experts of megatron.legacy (SwitchMLP), which have one form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import dropped_each
from core.engine.catalog.facets import MegatronModel
from core.errors import NoEffectError, UnsupportedError, UsageError
from core.megatron.extras.common_state import EXTRA_STATE, get_common_state
from core.megatron.extras.nested_dicts import drop_versions
from core.megatron.model.args import fields_of, parse_facts, replaced
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import Rules

KINDS: Mapping[str, str] = {
    "sequential": "sequential",
    "grouped": "grouped",
    "te-grouped": "te_grouped",
}
"""Kind, as users write it → form of the names (``core.megatron.rules.experts``)."""
_FLAGS = {
    "sequential": "without --moe-grouped-gemm",
    "te_grouped": "with --moe-grouped-gemm",
    "grouped": "with --moe-grouped-gemm",
}
_LEGACY = "moe_use_legacy_grouped_gemm"


def with_expert_kind(
    catalog: Catalog, kind: str | None, *, rules: Rules, implementation: str | None = None
) -> Catalog:
    """Return the global per-layer form with experts of another kind.

    Args:
        catalog: the result of ``core.megatron.reshard.unshard.unshard``.
        kind: one of ``KINDS``; None keeps the kind.
        rules: the layout's rules.
        implementation: the transformer implementation that the model will have, ``local`` or
            ``transformer_engine``; None keeps that of the arguments.

    Raises:
        UsageError: the model has no experts.
        UnsupportedError: the model cannot have experts of this kind.
    """
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
    model = catalog.facet(MegatronModel) or MegatronModel()
    if kind not in (None, *KINDS):
        raise UsageError(f"{OPTION}: {kind!r} is not one of: {', '.join(KINDS)}")
    if facts.n_experts is None:
        if kind is None:
            return catalog
        raise NoEffectError(("experts",), "the model has no experts")
    before = model.expert_names or facts.expert_names
    after = before if kind is None else KINDS[kind]
    is_local = facts.is_local if implementation is None else implementation == "local"
    if kind is not None:
        _check_kind(catalog, facts, rules, before=before, after=after, is_local=is_local)
    if after not in _FLAGS:
        return catalog

    # The arguments select the module that Megatron builds. Older runs lack the second one, which
    # is False by default.
    assert after is not None
    changes: dict[str, object] = {"moe_grouped_gemm": after != "sequential", _LEGACY: False}
    added: dict[str, object] = {}
    if after == "grouped" and not is_local:
        added[_LEGACY] = True
    if "moe_grouped_gemm" not in fields_of(catalog.args) and after != "sequential":
        added["moe_grouped_gemm"] = True
    args = replaced(catalog.args, changes, added=added)
    if before == after:
        # Another implementation may need another argument for the same module.
        if implementation is None or fields_of(args) == fields_of(catalog.args):
            return catalog
        return replace(catalog, args=args, common={**get_common_state(catalog), "args": args})

    # The order of names and the versions of modules are those of the other kind's modules.
    catalog = drop_versions(_with_single_states(catalog, facts, rules))
    note = f"the experts are converted to {kind} (start Megatron {_FLAGS[after]})"
    if after == "grouped":
        legacy = "" if is_local else " and --moe-use-legacy-grouped-gemm"
        note = f"{note[:-1]}{legacy}; megatron-core 0.17 and later do not support them)"
    return replace(
        catalog,
        args=args,
        common={**get_common_state(catalog), "args": args},
        notes=(*catalog.notes, note),
    ).with_facet(
        replace(
            model,
            expert_names=after,
            order=None if before == "te_grouped" else model.order,
            module_versions={},
        )
    )


def _check_kind(
    catalog: Catalog,
    facts: ModelFacts,
    rules: Rules,
    *,
    before: str | None,
    after: str | None,
    is_local: bool,
) -> None:
    """Raise unless the model can have experts of the form ``after``.

    Raises:
        UnsupportedError: it cannot.
    """
    if facts.kind.is_legacy or before == "switch":
        raise UnsupportedError(
            "megatron.legacy supports only one kind of experts, SwitchMLP",
            hint=f"remove {OPTION}",
        )
    if after == "te_grouped" and is_local:
        raise UnsupportedError(
            "the local transformer implementation does not support te-grouped experts",
            hint="use --transformer-impl transformer_engine, or --experts grouped",
        )
    if after == "grouped":
        for key in catalog.tensors:
            expert = rules.expert_of(key)
            if expert is not None and expert.rest.endswith(".bias"):
                raise UnsupportedError(
                    "GroupedMLP does not support biases, but this model's experts have them",
                    key=key,
                    hint=f"use {OPTION} sequential or te-grouped",
                )


def _with_single_states(catalog: Catalog, facts: ModelFacts, rules: Rules) -> Catalog:
    """Return the catalog with one empty extra state per expert instead of a rank's packed ones.

    Transformer Engine packs the states of all experts of a rank into one; filled ones are dropped,
    with a note.
    """
    packed = [
        key
        for key in (*catalog.tensors, *catalog.objects)
        if key.endswith(EXTRA_STATE) and rules.is_packed_state(key)
    ]
    if not packed:
        return catalog
    filled = [
        key
        for key in packed
        if (
            catalog.tensors[key].n_elements
            if key in catalog.tensors
            else catalog.objects[key].value is not None
        )
    ]
    single: dict[str, StoredObject] = {}
    for key in packed:
        expert = rules.expert_of(key)
        assert expert is not None, "packed states are those of experts"
        for number in range(facts.n_experts or 0):
            name = expert.numbered(number)
            single[name] = StoredObject(name)
    objects = {key: item for key, item in catalog.objects.items() if key not in packed}
    return replace(
        catalog,
        tensors={key: tensor for key, tensor in catalog.tensors.items() if key not in packed},
        objects={**objects, **single},
        dropped=(
            *catalog.dropped,
            *dropped_each(filled, "packed together with the rank's other experts", catalog.tensors),
        ),
    )
