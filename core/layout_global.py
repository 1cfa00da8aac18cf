"""From checkpoints that store global tensors under Megatron's names to the global per-layer form.

torch_dist stacks the layers of a homogeneous model (``decoder.layers.mlp.linear_fc2.weight``, (L, rows, columns)),
names norms as Transformer Engine fuses them, and wraps every extra state in an object of its own. DCP and torch
files hold what they were given: usually per-layer keys, with ``model.`` before them.

The result is that of ``core.layout_unshard``, with names as rank files of this model would have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from core.box import Box, Shape
from core.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.errors import CorruptError, UnsupportedError
from core.inert import ObjectLeaf, TensorLeaf, as_mapping, attributes, walk
from core.layout_args import Facts, facts_of
from core.layout_checks import check_complete, check_gate, check_qkv_rows
from core.layout_rules import Rules
from core.layout_state import (
    OPTIMIZER,
    RNG,
    check_version,
    is_chunk,
    iteration_of,
    refuse_or_drop_optimizer,
    sharded_object,
    texts_of,
)
from core.layout_vocab import cut_vocab, vocab_rows
from core.skeleton import Entry, mapped
from core.transform import is_optimizer_key

_PREFIXES = ("", "model.", "module.", "model.module.")
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a global per-layer tensor comes from.

    Args:
        keys: keys of the source that hold it; several are copies.
        layer: which layer of a stacked tensor, or None.
    """

    keys: tuple[str, ...]
    layer: int | None = None


def unshard_global(
    catalog: Catalog,
    *,
    rules: Rules,
    vocab_size: int | None,
    optim: str,
    keep_padded_vocab: bool,
    target_tp: int | None,
) -> Catalog:
    """The global per-layer form of a catalog of global tensors; see ``core.layout.unshard``."""
    prefix = _prefix_of(catalog, rules)
    common = _common_of(catalog)
    facts = facts_of(common.get("args"))
    notes = texts_of(catalog, "notes")
    dropped: list[str] = []
    if any(map(is_optimizer_key, [*catalog.tensors, *catalog.objects])) or common.get(OPTIMIZER) is not None:
        refuse_or_drop_optimizer(f"of {catalog.format}", optim=optim, dropped=dropped)
    common.pop(OPTIMIZER, None)
    states = {str(name): common.pop(name) for name in list(common) if sharded_object(str(name)) is not None}
    if "checkpoint_version" in common:
        check_version(common)
    beside = {leaf.key for leaf in walk([common, states]) if isinstance(leaf, TensorLeaf)}
    wanted = [key for key in catalog.tensors if not is_optimizer_key(key) and key not in beside]
    if prefix and any(_is_random_state(key) for key in wanted):
        wanted = [key for key in wanted if not _is_random_state(key)]
        dropped.append("rng_state (of one rank; start Megatron with --no-load-rng)")
    origins = _origins(catalog, wanted, prefix, facts, rules)
    metas = {name: _meta(catalog, name, origin) for name, origin in origins.items()}
    check_complete(metas, facts, rules)
    stored = [meta.shape[0] for name, meta in metas.items() if meta.shape and rules.rule_of(name).kind == "vocab"]
    n_rows = vocab_rows(facts, given=vocab_size, keep_padded=keep_padded_vocab, stored=stored, notes=notes)
    for name, meta in metas.items():
        rule = rules.rule_of(name)
        axis = rule.cut_axis
        if axis is not None and axis >= len(meta.shape):
            raise CorruptError(f"the tensor has {len(meta.shape)} axes, but its rule cuts axis {axis}", key=name)
        if rule.kind == "vocab":
            shape = cut_vocab(meta.shape, name, facts, n_rows=n_rows, target_tp=target_tp, notes=notes)
            metas[name] = replace(meta, shape=shape)
        partner = metas.get(name.replace("linear_fc1", "linear_fc2"))
        if rule.parts == "gated" and partner is not None and len(meta.shape) == len(partner.shape) == 2:
            check_gate(name, meta.shape[0], partner.shape[1], is_gated=facts.is_gated)
        if rule.unit == "heads" and name.endswith("linear_qkv.weight") and len(meta.shape) == 2:
            check_qkv_rows(name, meta.shape[0], facts)
    every = {**catalog.objects, **{key: StoredObject(key, value=value) for key, value in states.items()}}
    objects, moved = _objects(every, prefix, facts, rules)
    metas |= {name: TensorMeta(name, catalog.meta(key).dtype, catalog.meta(key).shape) for name, key in moved.items()}
    origins |= {name: _Origin((key,)) for name, key in moved.items()}

    @lru_cache(maxsize=32)
    def by_layer(key: str) -> Mapping[int, list[Fragment]]:
        return _by_layer(catalog.fragments(key))

    def fragments_of(key: str) -> Sequence[Fragment]:
        origin = origins.get(key)
        if origin is None:
            return catalog.fragments(key)
        found: list[Fragment] = []
        for source in origin.keys:
            pieces = catalog.fragments(source) if origin.layer is None else by_layer(source).get(origin.layer, [])
            for piece in pieces:
                kept = _cut(piece, metas[key].shape)
                if kept is not None:
                    found.append(replace(kept, key=key))
        return tuple(found)

    names = sorted([*metas, *(key for key in objects if key.endswith(_EXTRA))], key=lambda name: _place(name, rules))
    inside = beside | {
        leaf.key for item in objects.values() for leaf in walk(item.value) if isinstance(leaf, TensorLeaf)
    }
    inside |= {item.raw_key for item in objects.values() if item.raw_key is not None}
    return replace(
        catalog,
        tensors={name: metas[name] for name in names if name in metas},
        objects=objects,
        hidden={key: catalog.meta(key) for key in inside},
        fragments_of=fragments_of,
        skeleton=None,
        attrs={
            **{name: catalog.attrs[name] for name in ("dialect", "mcore_data") if name in catalog.attrs},
            "family": "megatron",
            "args": common["args"],
            "iteration": iteration_of(common),
            "checkpoint_version": common.get("checkpoint_version"),
            "topology": facts.topology,
            "common": common,
            "vocab_size": n_rows,
            "notes": notes,
            "dropped": dropped,
            "order": tuple(names),
            "module_versions": {},
            "is_ordered": True,
        },
    )


def is_megatron(catalog: Catalog, rules: Rules) -> bool:
    """Whether a catalog of global tensors has Megatron's names and training arguments; its objects are loaded."""
    if not any(key.startswith(prefix + rules.layers) for prefix in _PREFIXES for key in catalog.tensors):
        return False
    args = _common_of(catalog).get("args")
    known = attributes(args) or as_mapping(args) or {}
    return "tensor_model_parallel_size" in known


def _prefix_of(catalog: Catalog, rules: Rules) -> str:
    """What stands before Megatron's names in the keys.

    Raises:
        UnsupportedError: the keys are not Megatron's.
    """
    for prefix in _PREFIXES:
        if any(key.startswith(prefix + rules.layers) for key in catalog.tensors):
            return prefix
    example = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    raise UnsupportedError(
        f"the tensors do not have Megatron's names ({example!r} …), and names are not mapped yet",
        file=None,
        hint="a parallel layout can be given only to checkpoints of Megatron models",
    )


def _is_random_state(key: str) -> bool:
    """Whether a tensor belongs to the random states of a single rank's file."""
    return key == RNG or key.startswith(RNG + ".")


def _common_of(catalog: Catalog) -> dict[object, object]:
    """The entries beside the model by name, ``args`` among them."""
    found = as_mapping(catalog.attrs.get("common"))
    if found is not None:
        return dict(found)

    def value_of(entry: Entry) -> object:
        if isinstance(entry.leaf, ObjectLeaf):
            item = catalog.objects.get(entry.leaf.key)
            return entry.leaf if item is None or item.raw_key is not None else item.value
        return entry.leaf

    root = as_mapping(catalog.skeleton) or {}
    common = {
        name: mapped({"": value}, value_of)
        for name, value in root.items()
        if not is_chunk(name) and name != RNG and not isinstance(value, TensorLeaf)
    }
    plain: dict[object, object] = {}
    for name, value in common.items():
        inner = as_mapping(value)
        if inner:
            plain[name] = inner[""]
    for name, item in catalog.objects.items():
        if name == "args" and item.raw_key is None:
            plain["args"] = item.value
    if "args" in catalog.attrs:
        plain["args"] = catalog.attrs["args"]
    if attributes(plain.get("args")) is None and as_mapping(plain.get("args")) is None:
        plain.pop("args", None)
    return plain


def _origins(catalog: Catalog, keys: Iterable[str], prefix: str, facts: Facts, rules: Rules) -> dict[str, _Origin]:
    """Global per-layer name → where it comes from."""
    origins: dict[str, _Origin] = {}

    def add(name: str, key: str, layer: int | None) -> None:
        rule = rules.rule_of(name, shapes=[catalog.tensors[key].shape])
        if rule.tied is not None and facts.is_tied:
            name = rule.tied
        known = origins.get(name)
        if known is not None and (rule.tied is None or known.layer != layer):
            raise CorruptError(f"{known.keys[0]} and {key} are one tensor", key=name)
        origins[name] = _Origin((*(known.keys if known else ()), key), layer)

    for key in keys:
        if not key.startswith(prefix):
            raise UnsupportedError(
                f"other tensors have {prefix!r} before Megatron's names, this one has not",
                key=key,
                hint="leave it out with --exclude",
            )
        name = key[len(prefix) :]
        stacked = rules.stacked_of(name)
        single = rules.layer_of(name)
        if stacked is not None:
            shape = catalog.tensors[key].shape
            if not shape or shape[0] != facts.n_layers:
                raise CorruptError(
                    f"a stack of {shape[0] if shape else 0} layers in a model of {facts.n_layers}", key=key
                )
            for layer in range(facts.n_layers):
                add(rules.layer_name(layer, _sub(stacked, facts, rules)), key, layer)
        elif single is not None:
            add(rules.layer_name(single[0], _sub(single[1], facts, rules)), key, None)
        else:
            add(name, key, None)
    return origins


def _sub(sub: str, facts: Facts, rules: Rules) -> str:
    """A name within a layer as this model's rank files have it."""
    return rules.local(sub) if facts.is_local else sub


def _meta(catalog: Catalog, name: str, origin: _Origin) -> TensorMeta:
    first = catalog.tensors[origin.keys[0]]
    for key in origin.keys[1:]:
        other = catalog.tensors[key]
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CorruptError(
                f"{other.dtype} of shape {other.shape}, but its twin is {first.dtype} of {first.shape}", key=key
            )
    return TensorMeta(name, first.dtype, first.shape if origin.layer is None else first.shape[1:])


def _by_layer(fragments: Iterable[Fragment]) -> dict[int, list[Fragment]]:
    """The fragments of a stacked tensor as fragments of its layers."""
    found: dict[int, list[Fragment]] = {}
    for piece in fragments:
        first, count = piece.box.offset[0], piece.box.shape[0]
        box = Box(piece.box.offset[1:], piece.box.shape[1:])
        for step in range(count):
            at = piece.at
            if piece.array is not None:
                axis = len(piece.array.shape) - len(piece.box.shape)  # where the stacking axis is in the array
                if axis >= 0:
                    at = (*at[:axis], at[axis] + step, *at[axis + 1 :])
            found.setdefault(first + step, []).append(Fragment(piece.key, box, piece.array, at))
    return found


def _cut(piece: Fragment, shape: Shape) -> Fragment | None:
    """The part of a fragment that lies in ``shape``, which may have fewer rows than the tensor that is stored."""
    if not shape or piece.box.offset[0] + piece.box.shape[0] <= shape[0]:
        return piece
    rows = shape[0] - piece.box.offset[0]
    if rows <= 0:
        return None
    return replace(piece, box=Box(piece.box.offset, (rows, *piece.box.shape[1:])))


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
        if found is not None:
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            stacked = rules.stacked_of(name)
            if stacked is not None:
                name = rules.layer_name(found[1][0], stacked)
        layer = rules.layer_of(name)
        if layer is not None:
            name = rules.layer_name(layer[0], _sub(layer[1], facts, rules))
        rules.rule_of(name)
        if isinstance(value, TensorLeaf):
            tensors[name] = value.key
        else:
            objects[name] = StoredObject(name, value=value)
    return objects, tensors


def _place(name: str, rules: Rules) -> tuple[int, int, int, str, int]:
    """Sorts names into the order of a rank file: embedding, layers, the rest; parameters before extra states."""
    module, _, last = name.rpartition(".")
    within = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
    field = within.index(last) if last in within else len(within) + (last == _EXTRA)
    layer = rules.layer_of(name)
    if layer is not None:
        return 1, layer[0], rules.position(layer[1]), module, field
    is_first = rules.stage_of(name) == "first"
    rank = (
        "word_embeddings",
        "position_embeddings",
        "tokentype_embeddings",
        "final_norm",
        "final_layernorm",
        "output_layer",
    )
    place = next((i for i, word in enumerate(rank) if word in module), len(rank))
    return (0 if is_first else 2), 0, place, module, field
