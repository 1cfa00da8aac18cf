"""From the global per-layer form to torch_dist: stacked keys, fused names, one chunk for what each rank holds.

What Megatron writes for a rank (TP rank r, pipeline stage p) of a homogeneous model::

    decoder.layers.mlp.linear_fc2.weight  (L, rows, columns)   one chunk (1, rows, columns / TP) per layer of the stage
    decoder.layers.mlp.linear_fc1.weight  (L, 2F, columns)     gated: two chunks, of the gate's and of the up rows
    decoder.final_layernorm.weight        (rows,)              replicated: one chunk, from TP rank 0
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_8       object: the extra state of layer 3 of 8, in a list

Models whose layers differ keep one key per layer. The output layer has neither an extra state nor, where embeddings are
shared, a weight.

Source: Megatron-LM d98e8a64 and megatron-core 0.16.1, pinned in tests/golden (``mcore*_torch_dist``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.box import Box, whole
from core.catalog import Catalog, Coords, Fragment, StoredArray, StoredObject, TensorMeta, bind_nothing
from core.inert import TensorLeaf, walk
from core.layout_args import facts_of, replaced
from core.layout_cut import Cut, check_target, cut_of, zeros_of
from core.layout_rules import Rules
from core.layout_state import OPTIMIZER, RNG, common_of, sharded_object, texts_of
from core.layout_vocab import rows_of
from core.topology import LayerSplit, Topology


@dataclass(frozen=True, slots=True)
class Stacked:
    """A checkpoint in torch_dist's schema.

    Args:
        source: the source under torch_dist's keys: what the target is to be filled from.
        target: the chunks to be written, without extent; attrs["zeros"] lists boxes that no source holds.
    """

    source: Catalog
    target: Catalog


@dataclass(frozen=True, slots=True)
class _Member:
    """One per-layer tensor of a stacked key.

    Args:
        key: its global name.
        layer: its place on the stacking axis, or None where the key is not stacked.
        stage: the pipeline stage that holds it.
    """

    key: str
    layer: int | None
    stage: int

    def box(self, box: Box) -> Box:
        """A box of the member in the coordinates of the stacked tensor."""
        if self.layer is None:
            return box
        return Box((self.layer, *box.offset), (1, *box.shape))


def stack(catalog: Catalog, topology: Topology, *, rules: Rules, vocab_size: int | None = None) -> Stacked:
    """The source and target catalogs of a torch_dist checkpoint.

    The training arguments keep the sizes of the run that saved, see ``core.layout_args``: torch_dist loads at any
    sizes.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: which ranks' chunks to write; rank r of stage p writes file r + TP * p.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes what ``unshard`` found.

    Raises:
        UnsupportedError, UnknownTensorError, CorruptError: as for ``core.layout_shard.shard``.
    """
    check_target(topology)
    facts = facts_of(catalog.attrs.get("args"))
    layers = facts.split(topology.pp)
    n_rows = rows_of(catalog, vocab_size)
    cuts: dict[str, Cut] = {}
    states: dict[str, object] = {}
    for key, meta in catalog.tensors.items():
        rule = rules.rule_of(key, shapes=[meta.shape])
        if rule.kind == "opaque":
            states[key] = TensorLeaf(key)
        else:
            cuts[key] = cut_of(meta, rule, facts, tp=topology.tp, n_rows=n_rows)
    members = _members(catalog, cuts, layers, topology, rules)
    depth = {key: layers.n_layers if group[0].layer is not None else None for key, group in members.items()}

    def meta_of(key: str, *, is_target: bool) -> TensorMeta:
        first = catalog.tensors[members[key][0].key]
        shape = cuts[first.key].shape if is_target else first.shape
        n_layers = depth[key]
        return replace(first, key=key, shape=shape if n_layers is None else (n_layers, *shape))

    def source_fragments(key: str) -> Sequence[Fragment]:
        if key not in members:
            return catalog.fragments(key)
        return tuple(
            replace(piece, key=key, box=member.box(piece.box))
            for member in members[key]
            for piece in catalog.fragments(member.key)
        )

    def target_fragments(key: str) -> Sequence[Fragment]:
        if key in members:
            return tuple(_chunks(key, members[key], cuts, catalog, topology))
        meta = catalog.meta(key)
        return (Fragment(key, whole(meta.shape), StoredArray(key, meta.dtype, meta.shape), (0,) * len(meta.shape)),)

    objects = _objects(catalog, states, layers, topology, rules)
    notes = texts_of(catalog, "notes")
    padded = next((cuts[key].shape[0] for key in cuts if rules.rule_of(key).kind == "vocab"), None)
    args = _args(catalog, padded)
    common = {name: value for name, value in common_of(catalog).items() if name not in (OPTIMIZER, "args")}
    common = {"args": args, **common}
    inside = {
        leaf.key
        for part in (common, *(item.value for item in objects.values()))
        for leaf in walk(part)
        if isinstance(leaf, TensorLeaf)
    }
    inside |= {item.raw_key for item in objects.values() if item.raw_key is not None}
    hidden = {key: catalog.meta(key) for key in inside}
    if topology != facts.topology:
        notes.append(
            f"chunks are those of {topology}; the arguments keep {facts.topology}, torch_dist loads at any sizes"
        )
    zeros = {
        key: [member.box(box) for member in group for box in zeros_of(catalog.tensors[member.key], cuts[member.key])]
        for key, group in members.items()
    }
    attrs = {
        **{name: catalog.attrs[name] for name in ("dialect", "mcore_data") if name in catalog.attrs},
        "family": "megatron",
        "args": args,
        "common": common,
        "iteration": catalog.attrs.get("iteration"),
        "checkpoint_version": catalog.attrs.get("checkpoint_version"),
        "topology": topology,
        "notes": notes,
        "dropped": [*texts_of(catalog, "dropped"), *_left_out(catalog, states, rules)],
    }
    source = replace(
        catalog,
        tensors={key: meta_of(key, is_target=False) for key in members},
        fragments_of=source_fragments,
        objects=objects,
        hidden=hidden,
        attrs={**catalog.attrs, "notes": notes},
    )
    target = Catalog(
        format="torch_dist",
        version=None,
        tensors={key: meta_of(key, is_target=True) for key in members},
        fragments_of=target_fragments,
        objects=objects,
        hidden=hidden,
        attrs={**attrs, "zeros": {key: boxes for key, boxes in zeros.items() if boxes}},
        bind=bind_nothing,
    )
    return Stacked(source, target)


def _members(
    catalog: Catalog, cuts: Mapping[str, Cut], layers: LayerSplit, topology: Topology, rules: Rules
) -> dict[str, list[_Member]]:
    """torch_dist key → the per-layer tensors that it stacks (one, where it is not stacked)."""
    is_stacked = _is_homogeneous(catalog, cuts, layers, rules)
    found: dict[str, list[_Member]] = {}
    for key in cuts:
        layer = rules.layer_of(key)
        if layer is None:
            stage = 0 if rules.stage_of(key) == "first" else topology.pp - 1
            found[key] = [_Member(key, None, stage)]
            continue
        sub = rules.fused(layer[1])
        _, stage, _ = layers.chunk_of(layer[0])
        if is_stacked:
            found.setdefault(rules.layers + sub, []).append(_Member(key, layer[0], stage))
        else:
            found[rules.layer_name(layer[0], sub)] = [_Member(key, None, stage)]
    return found


def _is_homogeneous(catalog: Catalog, cuts: Mapping[str, Cut], layers: LayerSplit, rules: Rules) -> bool:
    """Whether every layer has the same tensors, with the same shapes and dtypes."""
    seen: dict[str, set[tuple[object, ...]]] = {}
    count: dict[str, int] = {}
    for key in cuts:
        layer = rules.layer_of(key)
        if layer is not None:
            meta = catalog.tensors[key]
            seen.setdefault(layer[1], set()).add((meta.dtype, meta.shape))
            count[layer[1]] = count.get(layer[1], 0) + 1
    return all(len(kinds) == 1 for kinds in seen.values()) and set(count.values()) <= {layers.n_layers}


def _chunks(
    key: str, group: Sequence[_Member], cuts: Mapping[str, Cut], catalog: Catalog, topology: Topology
) -> list[Fragment]:
    """The chunks of one key, in the order of the ranks that write them."""
    found = []
    for stage in range(topology.pp):
        mine = [member for member in group if member.stage == stage]
        for tp_rank in range(topology.tp):
            for member in mine:
                cut = cuts[member.key]
                if cut.axis is None and tp_rank > 0:
                    continue
                for piece in cut.pieces(tp_rank):
                    box = member.box(piece.box)
                    name = f"{key}@{','.join(map(str, box.offset))}"
                    array = StoredArray(
                        name, catalog.tensors[member.key].dtype, box.shape, coords=_file(tp_rank, stage, topology)
                    )
                    found.append(Fragment(key, box, array, (0,) * len(box.shape)))
    return found


def _file(tp_rank: int, stage: int, topology: Topology) -> Coords:
    """The file that a rank writes."""
    return (("file", tp_rank + topology.tp * stage),)


def _objects(
    catalog: Catalog, states: Mapping[str, object], layers: LayerSplit, topology: Topology, rules: Rules
) -> dict[str, StoredObject]:
    """ShardedObjects: extra states per layer, random states and others that the source had as such."""
    found: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        if key.endswith("_extra_state") and item.raw_key is None:
            states = {**states, key: item.value}
            continue
        shard = sharded_object(key)
        if shard is not None:
            coords = _file(0, 0, topology)
            if shard[0] == RNG and shard[2] == (topology.pp, topology.tp):
                coords = _file(shard[1][1], shard[1][0], topology)
            found[key] = replace(item, coords=coords)
    subs: dict[str, set[int]] = {}
    for key in states:
        layer = rules.layer_of(key)
        if layer is not None:
            subs.setdefault(layer[1], set()).add(layer[0])
    is_stacked = all(len(numbers) == layers.n_layers for numbers in subs.values())
    for key, value in states.items():
        layer = rules.layer_of(key)
        if layer is None:
            continue  # GPT models leave out the output layer's
        _, stage, _ = layers.chunk_of(layer[0])
        sub = rules.fused(layer[1])
        name = (
            f"{rules.layers}{sub}/shard_{layer[0]}_{layers.n_layers}"
            if is_stacked
            else f"{rules.layer_name(layer[0], sub)}/shard_0_1"
        )
        found[name] = StoredObject(name, value=[value], coords=_file(0, stage, topology))
    return found


def _left_out(catalog: Catalog, states: Mapping[str, object], rules: Rules) -> list[str]:
    """Extra states that torch_dist has no place for and that hold something."""
    held = {key: item.value for key, item in catalog.objects.items() if key.endswith("_extra_state")} | {**states}
    return [
        f"{key} (torch_dist checkpoints of GPT models have no place for it)"
        for key, value in held.items()
        if value is not None and sharded_object(key) is None and rules.layer_of(key) is None
    ]


def _args(catalog: Catalog, padded: int | None) -> object:
    """The arguments of a torch_dist checkpoint: sizes as they were, see ``core.layout_args``."""
    changes: dict[str, object] = {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    if padded is not None:
        changes["padded_vocab_size"] = padded
    return replaced(catalog.attrs["args"], changes)
