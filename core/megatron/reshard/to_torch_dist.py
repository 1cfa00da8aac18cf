"""From the global per-layer form to torch_dist: stacked keys, fused names, one chunk for what each rank holds.

What Megatron writes for a rank (TP rank r, pipeline stage p) of a homogeneous model::

    decoder.layers.mlp.linear_fc2.weight  (L, rows, columns)   one chunk (1, rows, columns / TP) per layer of the stage
    decoder.layers.mlp.linear_fc1.weight  (L, 2F, columns)     gated: two chunks, of the gate's and of the up rows
    decoder.final_layernorm.weight        (rows,)              replicated: one chunk, from TP rank 0
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_8       object: the extra state of layer 3 of 8, in a list
    decoder.layers.mlp.experts.experts.linear_fc2.weight  (L, E, rows, columns)    one chunk per expert of the rank

Models whose layers differ, or may (``moe_layer_freq``), keep one key per layer: ``decoder.layers.3.mlp.experts.experts.
linear_fc2.weight`` (E, rows, columns). The output layer has neither an extra state nor, where embeddings are shared, a
weight. An optimizer's states are stacked, cut and named as their parameters
(``core.megatron.optimizer.sharded.write``).

Source: Megatron-LM d98e8a64 and megatron-core 0.16.1, pinned in tests/golden (``mcore*_torch_dist``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from core.arrays.box import Box, full_box
from core.catalog.catalog import Catalog, Fragment, StoredObject, TargetCatalog, TargetFragment, TensorMeta
from core.catalog.facets import TorchDistFacts
from core.catalog.optimizer_keys import param_of
from core.catalog.stored import Coords, PlannedArray, array_name
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER, RNG, common_of, sharded_object
from core.megatron.model.args import facts_of, replaced
from core.megatron.model.cut import Cut, check_target, cuts_of, zeros_of
from core.megatron.model.facts import PREDICTION_STACK, Facts
from core.megatron.model.parts import with_sizes
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.optimizer.sharded.write import StackedOptimizer
from core.megatron.placement.joined import parted
from core.megatron.rules.rules import GPT, Rules
from core.pickle.inert import TensorLeaf, walk


@dataclass(frozen=True, slots=True)
class Stacked:
    """A checkpoint in torch_dist's schema.

    Args:
        source: the source under torch_dist's keys: what the target is to be filled from.
        target: the chunks to be written; ``zeros`` lists boxes that no source holds.
    """

    source: Catalog
    target: TargetCatalog


@dataclass(frozen=True, slots=True)
class _Member:
    """One per-layer tensor of a stacked key.

    Args:
        key: its global name.
        at: its index on the stacking axes (layers, then experts), as many as there are.
        shape: the extents of those axes.
        stage: the pipeline stage that holds it.
        ep: the expert parallel rank that holds it, or None where all do.
    """

    key: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    stage: int
    ep: int | None = None

    def box(self, box: Box) -> Box:
        """A box of the member in the coordinates of the stacked tensor."""
        return Box((*self.at, *box.offset), (*(1 for _ in self.at), *box.shape))


def stack(
    catalog: Catalog,
    topology: Topology,
    *,
    rules: Rules,
    vocab_size: int | None = None,
    format: str = "torch_dist",
    is_stacked: bool | None = None,
) -> Stacked:
    """The source and target catalogs of a torch_dist checkpoint.

    The training arguments keep the sizes of the run that saved, see ``core.megatron.model.args``: torch_dist loads at
    any sizes.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: which ranks' chunks to write; ranks are numbered as in ``Topology.ranks``.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes what ``unshard`` found.
        format: ``torch_dist`` or ``zarr``: what keeps the optimizer's state in the form of that one's readers.
        is_stacked: one key for all layers, or one for each; None for what Megatron makes of such a model.

    Raises:
        UsageError: layers that differ are to be stacked.
        UnsupportedError, UnknownTensorError, CorruptError: as for ``core.megatron.reshard.to_ranks.shard``.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "models with the names of megatron.legacy are only in rank files: Megatron-LM saves no torch_dist of them",
            hint="write --to megatron",
        )
    check_target(topology, facts)
    stages = facts.stages(topology.pp, topology.vpp, pipeline=topology.pipeline)
    n_rows = rows_of(catalog, vocab_size)
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=n_rows)
    opaque = [key for key in cuts if rules.rule_of(param_of(key)).kind == "opaque"]
    cuts = {key: cut for key, cut in cuts.items() if key not in opaque}
    dropped = list(catalog.dropped)
    states = _states(catalog, opaque, facts, rules, dropped)
    can_stack = _is_homogeneous(catalog, cuts, stages, rules)
    if is_stacked and not can_stack:
        raise UsageError("--stack-layers: the layers differ, so they have no key in common", hint="leave it out")
    is_stacked = can_stack and facts.is_stacked if is_stacked is None else is_stacked
    places = _Places(stages, topology, facts, rules, is_stacked)
    source_optimizer = catalog.optimizer
    reshard_target = None
    if source_optimizer is not None:
        reshard_target = ReshardTarget(
            catalog=catalog, optimizer=source_optimizer, topology=topology, facts=facts, rules=rules, cuts=cuts
        )
    optimizer = StackedOptimizer(reshard_target, format)
    members: dict[str, list[_Member]] = {}
    for key in cuts:
        name, member = places.of(param_of(key))
        members.setdefault(optimizer.key(key, name), []).append(replace(member, key=key))
    for name, group in members.items():
        _check_whole(name, group)

    def meta_of(key: str, *, is_target: bool) -> TensorMeta:
        head = members[key][0]
        first = catalog.tensors[head.key]
        return replace(first, key=key, shape=(*head.shape, *(cuts[head.key].shape if is_target else first.shape)))

    def source_fragments(key: str) -> Sequence[Fragment]:
        if key not in members:
            return catalog.fragments(key)
        return tuple(
            replace(piece, key=key, box=member.box(piece.box))
            for member in members[key]
            for piece in catalog.fragments(member.key)
        )

    def target_fragments(key: str) -> Sequence[TargetFragment]:
        if key in members:
            return tuple(_chunks(key, members[key], cuts, catalog, topology))
        meta = catalog.meta(key)
        return (Fragment(key, full_box(meta.shape), PlannedArray(key, meta.dtype, meta.shape), (0,) * len(meta.shape)),)

    objects = _objects(catalog, states, places)
    notes = list(catalog.notes)
    padded = next((cuts[key].shape[0] for key in cuts if rules.rule_of(param_of(key)).kind == "vocab"), None)
    args = _args(catalog, padded, format)
    common = {name: value for name, value in common_of(catalog).items() if name not in (OPTIMIZER, "args")}
    common = {"args": args, **common, **optimizer.common}
    notes += optimizer.notes
    parts = (common, *(item.value for item in objects.values()))
    inside = [leaf.key for leaf in walk(parts) if isinstance(leaf, TensorLeaf)]
    inside += [item.raw_key for item in objects.values() if item.raw_key is not None]
    hidden = {key: catalog.meta(key) for key in inside}
    if topology != facts.topology:
        notes.append(
            f"chunks are those of {topology}; the arguments keep {facts.topology}: Megatron loads it at any sizes"
        )
    zeros = {
        key: [member.box(box) for member in group for box in zeros_of(catalog.tensors[member.key], cuts[member.key])]
        for key, group in members.items()
    }
    torch_dist = catalog.facet(TorchDistFacts)
    if torch_dist is not None and optimizer.needs_common_file:
        torch_dist = replace(torch_dist, dialect="common_pt")
    source = replace(
        catalog,
        tensors={key: meta_of(key, is_target=False) for key in members},
        fragments_of=source_fragments,
        objects=objects,
        hidden=hidden,
        notes=tuple(notes),
    )
    target = Catalog(
        format="torch_dist",
        version=None,
        tensors={key: meta_of(key, is_target=True) for key in members},
        fragments_of=target_fragments,
        objects=objects,
        hidden=hidden,
        args=args,
        common=common,
        iteration=catalog.iteration,
        zeros={key: boxes for key, boxes in zeros.items() if boxes},
        notes=tuple(notes),
        dropped=(*dropped, *(_left_out(states, rules) if facts.kind is GPT else ())),
        write=catalog.write,
        facets={Topology: topology, **({} if torch_dist is None else {TorchDistFacts: torch_dist})},
    )
    facts = with_sizes(facts, {key: meta.shape for key, meta in catalog.tensors.items() if param_of(key) == key}, rules)
    return Stacked(
        parted(source, facts, rules, is_target=False),
        parted(target, facts, rules, is_target=True),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Finds the keys of a model's tensors in torch_dist, and who writes them.

    Args:
        is_stacked: layers are stacked.
    """

    stages: Stages
    topology: Topology
    facts: Facts
    rules: Rules
    is_stacked: bool

    def of(self, key: str) -> tuple[str, _Member]:
        """(torch_dist key, the tensor in it)."""
        rules = self.rules
        layer = rules.layer_of(key)
        if layer is None:
            _, stage = self.stages.chunk_at(rules.stage_of(key) or "last")
            return key, _Member(key, (), (), stage)
        sub = rules.fused(layer.sub) if self.facts.fuses_names else layer.sub
        if self.facts.pattern is None:
            sub = rules.in_torch_dist(sub)
        _, stage, _ = self.stages.chunk_of(layer.stack, layer.number)
        is_stacked = self.is_stacked and layer.stack != PREDICTION_STACK
        name = layer.stack + sub if is_stacked else str(replace(layer, sub=sub))
        at = ((layer.number, self.stages.n_layers(layer.stack)),) if is_stacked else ()
        expert = rules.expert_of(name)
        ep = None
        if expert is not None and expert.number is not None:
            n_experts = self.facts.n_experts or 1
            name = rules.expert_name(expert, names="stacked", number=0)
            at = (*at, (expert.number, n_experts))
            ep = expert.number // (n_experts // self.topology.ep)
        return name, _Member(key, tuple(i for i, _ in at), tuple(n for _, n in at), stage, ep)


def _is_homogeneous(catalog: Catalog, cuts: Mapping[str, Cut], stages: Stages, rules: Rules) -> bool:
    """Whether every layer of the main stack has the same tensors, with the same shapes and dtypes, of usual kinds."""
    seen: dict[tuple[str, str], set[tuple[object, ...]]] = {}
    count: dict[tuple[str, str], int] = {}
    for key in cuts:  # an optimizer's states are no names of layers
        layer = rules.layer_of(key)
        if layer is not None and layer.stack != PREDICTION_STACK:
            if layer.sub.startswith(rules.unstacked):
                return False
            meta, place = catalog.tensors[key], (layer.stack, layer.sub)
            seen.setdefault(place, set()).add((meta.dtype, meta.shape))
            count[place] = count.get(place, 0) + 1
    is_complete = all(n == stages.n_layers(stack) for (stack, _), n in count.items())
    return is_complete and all(len(kinds) == 1 for kinds in seen.values())


def _check_whole(name: str, group: Sequence[_Member]) -> None:
    """A stack of layers or experts has all of them.

    Raises:
        UnsupportedError: an optimizer has states of some only.
    """
    n_wanted = prod(group[0].shape)
    if len(group) != n_wanted:
        raise UnsupportedError(
            f"{len(group)} of the {n_wanted} tensors that are stacked there are in the checkpoint: it seems that the "
            "others were not trained",
            key=name,
            hint="leave the optimizer out with --no-optim",
        )


def _chunks(
    key: str, group: Sequence[_Member], cuts: Mapping[str, Cut], catalog: Catalog, topology: Topology
) -> list[TargetFragment]:
    """The chunks of one key, in the order of the ranks that write them: the first that holds each."""
    found: dict[Box, TargetFragment] = {}
    held: dict[tuple[int, int | None], list[_Member]] = {}
    for member in group:
        held.setdefault((member.stage, member.ep), []).append(member)
    for number, rank in enumerate(topology.ranks()):
        for member in (*held.get((rank.pp, None), ()), *held.get((rank.pp, rank.ep), ())):
            for piece in cuts[member.key].pieces(rank):
                box = member.box(piece.box)
                if box not in found:
                    name = array_name(key, box)
                    dtype = catalog.tensors[member.key].dtype
                    array = PlannedArray(name, dtype, box.shape, coords=_file(number))
                    found[box] = Fragment(key, box, array, (0,) * len(box.shape))
    return list(found.values())


def _file(number: int) -> Coords:
    """The file that a rank writes."""
    return (("file", number),)


def _objects(catalog: Catalog, states: Mapping[str, object], places: _Places) -> dict[str, StoredObject]:
    """ShardedObjects: extra states per layer and expert, random states and others that the source had as such."""
    topology = places.topology
    first: dict[tuple[int, int | None], int] = {}  # (stage, expert rank or None) → the first rank that holds its states
    by_rng: dict[tuple[int, ...], int] = {}
    for number, rank in enumerate(topology.ranks()):
        for ep_rank in (None, rank.ep):
            first.setdefault((rank.pp, ep_rank), number)
        by_rng.setdefault((rank.pp, rank.tp), number)
    found: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        shard = sharded_object(key)
        if shard is not None:
            is_rng = shard[0] == RNG and shard[2] == (topology.pp, topology.tp)
            found[key] = replace(item, coords=_file(by_rng[shard[1]] if is_rng else 0))
    for key, value in states.items():
        if places.facts.kind is GPT and places.rules.layer_of(key) is None:
            continue  # GPT models leave out the output layer's
        name, member = places.of(key)
        offset, shape = ".".join(map(str, member.at)) or "0", ".".join(map(str, member.shape)) or "1"
        name = f"{name}/shard_{offset}_{shape}"
        found[name] = StoredObject(name, value=[value], coords=_file(first[member.stage, member.ep]))
    return found


def _states(
    catalog: Catalog, tensors: Iterable[str], facts: Facts, rules: Rules, dropped: list[str]
) -> dict[str, object]:
    """Extra states by global name, those of grouped experts one for each expert.

    What such a state holds for its experts is packed by Transformer Engine and cannot be told apart here; an empty one
    is empty for each.
    """
    found: dict[str, object] = {}
    values: dict[str, object] = {key: TensorLeaf(key) for key in tensors}
    values |= {
        key: item.value
        for key, item in catalog.objects.items()
        if key.endswith(EXTRA_STATE) and item.raw_key is None and sharded_object(key) is None
    }
    for key, value in values.items():
        expert = rules.expert_of(key)
        if expert is None or not rules.is_packed_state(key):
            found[key] = value
            continue
        if value is not None and (key not in catalog.tensors or catalog.tensors[key].n_elements):
            dropped.append(f"{key} (packed for the experts of a rank)")
        found |= {expert.numbered(number): None for number in range(facts.n_experts or 0)}
    return found


def _left_out(states: Mapping[str, object], rules: Rules) -> list[str]:
    """Extra states that torch_dist has no place for and that hold something."""
    return [
        f"{key} (torch_dist checkpoints of GPT models have no place for it)"
        for key, value in states.items()
        if value is not None and rules.layer_of(key) is None
    ]


def _args(catalog: Catalog, padded: int | None, format: str) -> object:
    """The arguments of a torch_dist checkpoint: sizes as they were, see ``core.megatron.model.args``."""
    changes: dict[str, object] = {"ckpt_format": format, "use_dist_ckpt": True}
    if padded is not None:
        changes["padded_vocab_size"] = padded
    return replaced(catalog.args, changes)
