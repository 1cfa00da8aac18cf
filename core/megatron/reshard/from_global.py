"""From checkpoints that store global tensors under Megatron's names to the global per-layer form.

torch_dist stacks the layers of a homogeneous model (``decoder.layers.mlp.linear_fc2.weight``, (L, rows, columns)) and
the experts of a layer (``mlp.experts.experts.linear_fc2.weight``, (L, E, rows, columns), or (E, rows, columns) in a
model whose layers differ), names norms as Transformer Engine fuses them, and wraps every extra state in an object of
its own. DCP and torch files hold what they were given: usually per-layer keys, with ``model.`` before them.

The result is that of ``core.megatron.reshard.from_ranks``, with names as rank files of this model would have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from core.catalog.catalog import Catalog, StoredObject, TensorMeta
from core.catalog.facets import MegatronModel, TorchDistFacts
from core.changes.select import is_optimizer_key
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.common_state import (
    OPTIMIZER,
    RNG,
    check_version,
    is_chunk,
    iteration_of,
    refuse_or_drop_optimizer,
    sharded_object,
)
from core.megatron.extras.order import by_place
from core.megatron.model.args import facts_of
from core.megatron.model.checks import check_complete, check_shape, fc2_of, gate_notes, with_gate
from core.megatron.model.facts import Facts
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import cut_vocab, vocab_rows
from core.megatron.optimizer.sharded.read import read_states, with_states
from core.megatron.placement.joined import joined
from core.megatron.placement.origins import Origin, Pieces, meta_of, names_in, origins_of
from core.megatron.rules.rules import Layer, Rules
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, attributes, walk
from core.pickle.nesting import LeafEntry, map_leaves

_PREFIXES = ("", "model.", "module.", "model.module.")
_EXTRA = "_extra_state"


def unshard_global(
    catalog: Catalog,
    *,
    rules: Rules,
    vocab_size: int | None,
    optim: str,
    keep_padded_vocab: bool,
    target_tp: int | None,
    store: ReadStore | None,
) -> Catalog:
    """The global per-layer form of a catalog of global tensors; see ``core.megatron.reshard.reshard.unshard``."""
    catalog = joined(catalog, rules)
    prefix = prefix_of(catalog, rules)
    common = common_entries(catalog)
    facts = facts_of(common.get("args"), names=rules.model_of(numbered_names(catalog, prefix, rules)))
    notes = list(catalog.notes)
    dropped: list[str] = []
    entry = common.pop(OPTIMIZER, None)
    has_optimizer = entry is not None or any(map(is_optimizer_key, [*catalog.tensors, *catalog.objects]))
    if has_optimizer and optim != "carry":
        refuse_or_drop_optimizer(f"of {catalog.format}", optim=optim, dropped=dropped)
    states = {str(name): common.pop(name) for name in list(common) if sharded_object(str(name)) is not None}
    if "checkpoint_version" in common:
        check_version(common)
    beside = {leaf.key for leaf in walk([common, states]) if isinstance(leaf, TensorLeaf)}
    wanted = [key for key in catalog.tensors if not is_optimizer_key(key) and key not in beside]
    if prefix and any(is_random_state(key) for key in wanted):
        wanted = [key for key in wanted if not is_random_state(key)]
        dropped.append("rng_state (of one rank; start Megatron with --no-load-rng)")
    origins = origins_of(catalog, {key: without_prefix(prefix, key) for key in wanted}, facts, rules)
    metas = {name: meta_of(catalog, name, origin) for name, origin in origins.items()}
    check_complete(metas, facts, rules)
    said, facts = facts, with_gate(facts, {name: meta.shape for name, meta in metas.items()})
    notes += gate_notes(said, facts)
    stored = [meta.shape[0] for name, meta in metas.items() if meta.shape and rules.rule_of(name).kind == "vocab"]
    n_rows = vocab_rows(facts, given=vocab_size, keep_padded=keep_padded_vocab, stored=stored, notes=notes)
    for name, meta in metas.items():
        rule = rules.rule_of(name)
        axis = rule.cut_axis
        if axis is not None and axis >= len(meta.shape):
            raise CorruptError(f"the tensor has {len(meta.shape)} axes, but its rule cuts axis {axis}", key=name)
        partner = metas.get(fc2_of(name))
        check_shape(name, meta.shape, None if partner is None else partner.shape, rule, facts)
        if rule.kind == "vocab":
            shape = cut_vocab(meta.shape, name, facts, n_rows=n_rows, target_tp=target_tp, notes=notes)
            metas[name] = replace(meta, shape=shape)
    every = {**catalog.objects, **{key: StoredObject(key, value=value) for key, value in states.items()}}
    objects, moved = _objects(every, prefix, facts, rules)
    metas |= {name: TensorMeta(name, catalog.meta(key).dtype, catalog.meta(key).shape) for name, key in moved.items()}
    origins |= {name: Origin((key,)) for name, key in moved.items()}
    names = sorted([*metas, *(key for key in objects if key.endswith(_EXTRA))], key=by_place(rules))
    inside = beside | {
        leaf.key for item in objects.values() for leaf in walk(item.value) if isinstance(leaf, TensorLeaf)
    }
    inside |= {item.raw_key for item in objects.values() if item.raw_key is not None}
    megatron = MegatronModel(
        vocab_size=n_rows,
        expert_names=facts.expert_names,
        is_down_proj_cut=facts.is_mla and facts.is_local,
        order=tuple(names),
    )
    model = replace(
        catalog,
        tensors={name: metas[name] for name in names if name in metas},
        objects=objects,
        hidden={key: catalog.meta(key) for key in inside},
        fragments_of=Pieces(catalog, origins, metas).fragments_of,
        skeleton=None,
        args=common["args"],
        iteration=iteration_of(common),
        common=common,
        optimizer=None,
        aliases={},
        unsupported={},
        carried={},
        documents={},
        notes=tuple(notes),
        dropped=tuple(dropped),
        facets=_torch_dist_facts(catalog) | {Topology: facts.topology, MegatronModel: megatron},
    )
    if not has_optimizer or optim != "carry":
        return model
    return with_states(model, read_states(catalog, model, entry, facts, rules, prefix=prefix, store=store))


def is_megatron(catalog: Catalog, rules: Rules) -> bool:
    """Whether a catalog of global tensors has Megatron's names and training arguments; its objects are loaded."""
    if catalog.is_rank_local:
        return False
    beginnings = tuple(prefix + stack for prefix in _PREFIXES for stack in rules.main_stacks)
    if not any(key.startswith(beginnings) for key in catalog.tensors):
        return False
    args = common_entries(catalog).get("args")
    known = attributes(args) or as_mapping(args) or {}
    return "tensor_model_parallel_size" in known


def has_megatron_names(catalog: Catalog, rules: Rules) -> bool:
    """Return whether a catalog has the names of Megatron's attention, which others do not call so in such layers."""
    attention = [key for key in catalog.tensors if ".self_attention." in key]
    return any(rules.has_main_stack(key.removeprefix(prefix)) for prefix in _PREFIXES for key in attention)


def _has_stack(key: str, prefix: str, rules: Rules) -> bool:
    return key.startswith(prefix) and rules.has_main_stack(key[len(prefix) :])


def numbered_names(catalog: Catalog, prefix: str, rules: Rules) -> Iterator[str]:
    """The tensors' names; of one that stacks layers, that of its last."""
    for key, meta in catalog.tensors.items():
        name = key.removeprefix(prefix)
        stacked = rules.stacked_of(name)
        yield str(Layer(stacked[0], meta.shape[0] - 1, stacked[1])) if stacked and meta.shape else name


def prefix_of(catalog: Catalog, rules: Rules) -> str:
    """What stands before Megatron's names in the keys.

    Raises:
        UnsupportedError: the keys are not Megatron's.
    """
    for prefix in _PREFIXES:
        if any(_has_stack(key, prefix, rules) for key in catalog.tensors):
            return prefix
    example = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    raise UnsupportedError(
        f"the tensors do not have Megatron's names ({example!r} …)",
        hint="a parallel layout can be given only to checkpoints of Megatron models",
    )


def without_prefix(prefix: str, key: str) -> str:
    """A key without the prefix that all keys of the model have.

    Raises:
        UnsupportedError: this one has not.
    """
    if not key.startswith(prefix):
        raise UnsupportedError(
            f"other tensors have {prefix!r} before Megatron's names, this one has not",
            key=key,
            hint="leave it out with --exclude",
        )
    return key[len(prefix) :]


def _torch_dist_facts(catalog: Catalog) -> dict[type, object]:
    """Return the facet that torch_dist writes again; shapes of the optimizer's tensors go with their old form."""
    facts = catalog.facet(TorchDistFacts)
    if facts is None:
        return {}
    if facts.mcore_data is not None:
        mcore_data = {key: {} if is_optimizer_key(key) else entry for key, entry in facts.mcore_data.items()}
        facts = replace(facts, mcore_data=mcore_data)
    return {TorchDistFacts: facts}


def is_random_state(key: str) -> bool:
    """Whether a tensor belongs to the random states of a single rank's file."""
    return key == RNG or key.startswith(RNG + ".")


def common_entries(catalog: Catalog) -> dict[object, object]:
    """The entries beside the model by name, ``args`` among them."""
    found = catalog.common
    if found is not None:
        return dict(found)

    def value_of(entry: LeafEntry) -> object:
        if isinstance(entry.leaf, ObjectLeaf):
            item = catalog.objects.get(entry.leaf.key)
            return entry.leaf if item is None or item.raw_key is not None else item.value
        return entry.leaf

    root = as_mapping(catalog.skeleton) or {}
    common = {
        name: map_leaves({"": value}, value_of)
        for name, value in root.items()
        if not is_chunk(name) and name != RNG and not isinstance(value, TensorLeaf)
    }
    plain: dict[object, object] = {}
    for name, value in common.items():
        inner = as_mapping(value)
        if inner:
            plain[name] = inner[""]
    for name, item in catalog.objects.items():
        if name in ("args", OPTIMIZER) and item.raw_key is None:
            plain[name] = item.value
    if catalog.args is not None:
        plain["args"] = catalog.args
    if attributes(plain.get("args")) is None and as_mapping(plain.get("args")) is None:
        plain.pop("args", None)
    return plain


def _objects(
    every: Mapping[str, StoredObject], prefix: str, facts: Facts, rules: Rules
) -> tuple[dict[str, StoredObject], dict[str, str]]:
    """(objects by their new keys, extra states that are tensors: new key → hidden key).

    Extra states get their layer's name; random states and others that belong to single ranks keep their keys. What the
    common state holds is not repeated.
    """
    objects: dict[str, StoredObject] = {}
    tensors: dict[str, str] = {}
    for key, item in every.items():
        if is_optimizer_key(key):
            continue
        found = sharded_object(key)
        name = found[0] if found else key
        if not name.endswith(_EXTRA):
            if found is not None:
                objects[key] = item
            continue
        if item.raw_key is not None:
            objects[key] = item
            continue
        name = name.removeprefix(prefix)
        value = item.value
        if found is not None and isinstance(value, list) and len(value) == 1:
            value = value[0]
        names = dict(names_in(name, facts, rules))
        depth = len(next(iter(names)))
        whole = names.get(found[1][:depth] if found is not None else ())
        if whole is None:
            objects[key] = item
            continue
        rules.rule_of(whole)
        if isinstance(value, TensorLeaf):
            tensors[whole] = value.key
        else:
            objects[whole] = StoredObject(whole, value=value)
    return objects, tensors
