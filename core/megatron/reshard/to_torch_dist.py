"""The global per-layer form as torch_dist: stacked keys, fused names, one chunk for the part that
each rank holds.

Megatron writes for a rank (TP rank r, pipeline stage p) of a homogeneous model::

    decoder.layers.mlp.linear_fc2.weight  (L, rows, columns)   one chunk (1, rows, columns / TP) per layer of the stage
    decoder.layers.mlp.linear_fc1.weight  (L, 2F, columns)     gated: two chunks, of the gate's and of the up rows
    decoder.final_layernorm.weight        (rows,)              replicated: one chunk, from TP rank 0
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_8       object: the extra state of layer 3 of 8, in a list
    decoder.layers.mlp.experts.experts.linear_fc2.weight  (L, E, rows, columns)    one chunk per expert of the rank

Models whose layers differ, or may (``moe_layer_freq``), keep one key per layer:
``decoder.layers.3.mlp.experts.experts. linear_fc2.weight`` (E, rows, columns). The output layer has
neither an extra state nor, where embeddings are shared, a weight. An optimizer's states are
stacked, cut and named as their parameters (``core.megatron.optimizer.sharded.write``).

Source: Megatron-LM d98e8a64 and megatron-core 0.16.1, pinned in tests/golden
    (``mcore*_torch_dist``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from core.arrays.box import Box, full_box
from core.catalog.catalog import (
    Catalog,
    Fragment,
    StoredObject,
    TargetCatalog,
    TargetFragment,
    TensorMeta,
)
from core.catalog.facets import TorchDistFacts
from core.catalog.optimizer_keys import param_of
from core.catalog.stored import Coords, PlannedArray, array_name
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER, RNG, common_of, sharded_object
from core.megatron.model.args import facts_of, replaced
from core.megatron.model.cut import Cut, check_target, cuts_of, zeros_of
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.parts import with_sizes
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.optimizer.sharded.write import StackedOptimizer
from core.megatron.placement.joined import separate_parts
from core.megatron.rules.rules import GPT, Rules
from core.pickle.inert import TensorLeaf, walk


@dataclass(frozen=True, slots=True)
class Stacked:
    """A checkpoint in torch_dist's schema.

    Args:
        source: the source under torch_dist's keys; the target is filled from it.
        target: the chunks to be written; ``zeros`` lists boxes that no source holds.
    """

    source: Catalog
    target: TargetCatalog


@dataclass(frozen=True, slots=True)
class _StackedTensor:
    """One per-layer tensor of a stacked key.

    Args:
        key: global name of the tensor.
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
        """Return a box of this tensor in the coordinates of the stacked one."""
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
    """Return the source and target catalogs of a torch_dist checkpoint.

    The training arguments keep the sizes of the run that saved (``core.megatron.model.args`` says
    why): torch_dist loads at any sizes.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: which ranks' chunks to write; ranks are numbered as in ``Topology.ranks``.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes the number that ``unshard`` found.
        format: ``torch_dist`` or ``zarr``; the optimizer's state gets the form that readers of that
            one load.
        is_stacked: True for one key for all layers, False for one for each; None for Megatron's
            choice for such a model.

    Raises:
        UsageError: layers that differ are to be stacked.
        UnsupportedError, UnknownTensorError, CorruptError: as for
            ``core.megatron.reshard.to_ranks.shard``.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "models with the names of megatron.legacy are only in rank files: Megatron-LM saves no torch_dist of them",
            hint="write --to megatron",
        )
    check_target(topology, facts)
    stages = facts.stages(topology.pp, topology.vpp, pipeline=topology.pipeline)

    # Decide how every tensor is cut; opaque ones become objects.
    all_cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))
    opaque = [key for key in all_cuts if rules.rule_of(param_of(key)).kind == "opaque"]
    cuts = {key: cut for key, cut in all_cuts.items() if key not in opaque}
    states = _extra_states(catalog, opaque, facts, rules)

    # Collect the tensors of every key.
    can_stack = _is_homogeneous(catalog, cuts, stages, rules)
    if is_stacked and not can_stack:
        raise UsageError(
            "--stack-layers: the layers differ, so they have no key in common", hint="leave it out"
        )
    is_stacked = can_stack and facts.is_stacked if is_stacked is None else is_stacked
    names = _StackedNames(stages, topology, facts, rules, is_stacked)
    target = None
    if catalog.optimizer is not None:
        target = ReshardTarget(
            catalog=catalog,
            optimizer=catalog.optimizer,
            topology=topology,
            facts=facts,
            rules=rules,
            cuts=cuts,
        )
    optimizer = StackedOptimizer(target, format)
    model = _StackedModel(catalog, topology, cuts, _group_tensors(cuts, names, optimizer))

    # Put the entries together.
    objects = _sharded_objects(catalog, states.values, names)
    common = _common_state(catalog, cuts, rules, optimizer, format)
    notes = [*catalog.notes, *optimizer.notes]
    if topology != facts.topology:
        notes.append(
            f"chunks are those of {topology}; the arguments keep {facts.topology}: Megatron loads it at any sizes"
        )
    dropped = [*catalog.dropped, *states.dropped]
    if facts.kind is GPT:
        dropped += _notes_of_lost_states(states.values, rules)
    torch_dist = catalog.facet(TorchDistFacts)
    if torch_dist is not None and optimizer.needs_common_file:
        torch_dist = replace(torch_dist, dialect="common_pt")
    hidden = _hidden_tensors(catalog, common, objects)

    source_catalog = replace(
        catalog,
        tensors=model.metas(is_target=False),
        fragments_of=model.source_fragments,
        objects=objects,
        hidden=hidden,
        notes=tuple(notes),
    )
    target_catalog = Catalog(
        format="torch_dist",
        version=None,
        tensors=model.metas(is_target=True),
        fragments_of=model.target_fragments,
        objects=objects,
        hidden=hidden,
        args=common["args"],
        common=common,
        iteration=catalog.iteration,
        zeros=model.zeros(),
        notes=tuple(notes),
        dropped=tuple(dropped),
        write=catalog.write,
        facets={Topology: topology, **({} if torch_dist is None else {TorchDistFacts: torch_dist})},
    )
    facts = with_sizes(
        facts,
        {key: meta.shape for key, meta in catalog.tensors.items() if param_of(key) == key},
        rules,
    )
    return Stacked(
        separate_parts(source_catalog, facts, rules, is_target=False),
        separate_parts(target_catalog, facts, rules, is_target=True),
    )


@dataclass(frozen=True, slots=True)
class _StackedNames:
    """Finds the keys of a model's tensors in torch_dist, and the ranks that write them.

    Args:
        is_stacked: layers are stacked.
    """

    stages: Stages
    topology: Topology
    facts: ModelFacts
    rules: Rules
    is_stacked: bool

    def of(self, key: str) -> tuple[str, _StackedTensor]:
        """Return (torch_dist's key, the tensor in it)."""
        rules = self.rules
        layer = rules.layer_of(key)
        if layer is None:
            _, stage = self.stages.chunk_at(rules.stage_of(key) or "last")
            return key, _StackedTensor(key, (), (), stage)

        # Names in torch_dist are those of Transformer Engine.
        sub = rules.fused(layer.sub) if self.facts.fuses_names else layer.sub
        if self.facts.pattern is None:
            sub = rules.in_torch_dist(sub)
        _, stage, _ = self.stages.chunk_of(layer.stack, layer.number)
        is_stacked = self.is_stacked and layer.stack != PREDICTION_STACK
        name = layer.stack + sub if is_stacked else str(replace(layer, sub=sub))
        axes = [(layer.number, self.stages.n_layers(layer.stack))] if is_stacked else []

        # The experts of a layer are always stacked.
        expert = rules.expert_of(name)
        ep = None
        if expert is not None and expert.number is not None:
            n_experts = self.facts.n_experts or 1
            name = rules.expert_name(expert, names="stacked", number=0)
            axes.append((expert.number, n_experts))
            ep = expert.number // (n_experts // self.topology.ep)
        return name, _StackedTensor(
            key, tuple(i for i, _ in axes), tuple(n for _, n in axes), stage, ep
        )


def _is_homogeneous(
    catalog: Catalog, cuts: Mapping[str, Cut], stages: Stages, rules: Rules
) -> bool:
    """Return whether all layers of the main stack have the same tensors, of the same shapes, dtypes
    and usual kinds.
    """
    kinds: dict[tuple[str, str], set[tuple[object, ...]]] = {}
    count: dict[tuple[str, str], int] = {}
    for key in cuts:  # an optimizer's states are not names of layers
        layer = rules.layer_of(key)
        if layer is not None and layer.stack != PREDICTION_STACK:
            if layer.sub.startswith(rules.unstacked):
                return False
            meta, place = catalog.tensors[key], (layer.stack, layer.sub)
            kinds.setdefault(place, set()).add((meta.dtype, meta.shape))
            count[place] = count.get(place, 0) + 1
    is_complete = all(n == stages.n_layers(stack) for (stack, _), n in count.items())
    return is_complete and all(len(of_place) == 1 for of_place in kinds.values())


def _group_tensors(
    cuts: Iterable[str], names: _StackedNames, optimizer: StackedOptimizer
) -> dict[str, list[_StackedTensor]]:
    """Return torch_dist's key → the tensors that it stacks, in the order of their keys.

    Raises:
        UnsupportedError: a stack lacks layers or experts, because the optimizer has states of some
            only.
    """
    groups: dict[str, list[_StackedTensor]] = {}
    for key in cuts:
        name, tensor = names.of(param_of(key))
        groups.setdefault(optimizer.key(key, name), []).append(replace(tensor, key=key))
    for name, group in groups.items():
        n_expected = prod(group[0].shape)
        if len(group) != n_expected:
            raise UnsupportedError(
                f"only {len(group)} of the {n_expected} tensors that are stacked here are in the checkpoint: it seems "
                "that the others were not trained",
                key=name,
                hint="leave the optimizer out with --no-optim",
            )
    return groups


@dataclass(frozen=True, slots=True)
class _StackedModel:
    """The tensors of a model under torch_dist's keys.

    Args:
        catalog: the global per-layer form.
        topology: the ranks that write.
        cuts: global key → how it is cut.
        groups: torch_dist's key → the tensors that it stacks.
    """

    catalog: Catalog
    topology: Topology
    cuts: Mapping[str, Cut]
    groups: Mapping[str, Sequence[_StackedTensor]]

    def metas(self, *, is_target: bool) -> dict[str, TensorMeta]:
        """Return the metadata of every key: with the shapes of the destination, or those of the
        source.
        """
        metas: dict[str, TensorMeta] = {}
        for key, group in self.groups.items():
            first = self.catalog.tensors[group[0].key]
            shape = self.cuts[first.key].shape if is_target else first.shape
            metas[key] = replace(first, key=key, shape=(*group[0].shape, *shape))
        return metas

    def source_fragments(self, key: str) -> Sequence[Fragment]:
        """Return the fragments of the source that a key's tensors are made of."""
        if key not in self.groups:
            return self.catalog.fragments(key)
        return tuple(
            replace(piece, key=key, box=tensor.box(piece.box))
            for tensor in self.groups[key]
            for piece in self.catalog.fragments(tensor.key)
        )

    def target_fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the chunks of a key, in the order of the ranks that write them: the first that
        holds each.
        """
        if key not in self.groups:
            meta = self.catalog.meta(key)
            array = PlannedArray(key, meta.dtype, meta.shape)
            return (Fragment(key, full_box(meta.shape), array, (0,) * len(meta.shape)),)

        # A rank writes the tensors of its stage, and of its experts.
        by_holder: dict[tuple[int, int | None], list[_StackedTensor]] = {}
        for tensor in self.groups[key]:
            by_holder.setdefault((tensor.stage, tensor.ep), []).append(tensor)
        chunks: dict[Box, TargetFragment] = {}
        for number, rank in enumerate(self.topology.ranks()):
            for tensor in (
                *by_holder.get((rank.pp, None), ()),
                *by_holder.get((rank.pp, rank.ep), ()),
            ):
                for piece in self.cuts[tensor.key].pieces(rank):
                    box = tensor.box(piece.box)
                    if box not in chunks:
                        dtype = self.catalog.tensors[tensor.key].dtype
                        array = PlannedArray(
                            array_name(key, box), dtype, box.shape, coords=_file_coords(number)
                        )
                        chunks[box] = Fragment(key, box, array, (0,) * len(box.shape))
        return tuple(chunks.values())

    def zeros(self) -> dict[str, list[Box]]:
        """Return the boxes of the destination that no source holds: padding of the vocabulary."""
        zeros: dict[str, list[Box]] = {}
        for key, group in self.groups.items():
            boxes = [
                tensor.box(box)
                for tensor in group
                for box in zeros_of(self.catalog.tensors[tensor.key], self.cuts[tensor.key])
            ]
            if boxes:
                zeros[key] = boxes
        return zeros


def _file_coords(number: int) -> Coords:
    """Return the coordinates of the file that a rank writes."""
    return (("file", number),)


@dataclass(frozen=True, slots=True)
class _ExtraStates:
    """The extra states of a model.

    Args:
        values: global name → value.
        dropped: states that are left out, each with the reason.
    """

    values: Mapping[str, object]
    dropped: Sequence[str]


def _extra_states(
    catalog: Catalog, tensors: Iterable[str], facts: ModelFacts, rules: Rules
) -> _ExtraStates:
    """Return the extra states by global name, those of grouped experts one for each expert.

    The state that a rank keeps for all of its experts is packed by Transformer Engine and cannot be
    told apart here; an empty one is empty for each.

    Args:
        tensors: keys of states that are tensors.
    """
    values: dict[str, object] = {key: TensorLeaf(key) for key in tensors}
    values |= {
        key: item.value
        for key, item in catalog.objects.items()
        if key.endswith(EXTRA_STATE) and item.raw_key is None and sharded_object(key) is None
    }
    states: dict[str, object] = {}
    dropped: list[str] = []
    for key, value in values.items():
        expert = rules.expert_of(key)
        if expert is None or not rules.is_packed_state(key):
            states[key] = value
            continue
        if value is not None and (key not in catalog.tensors or catalog.tensors[key].n_elements):
            dropped.append(f"{key} (packed for the experts of a rank)")
        states |= {expert.numbered(number): None for number in range(facts.n_experts or 0)}
    return _ExtraStates(states, dropped)


def _sharded_objects(
    catalog: Catalog, states: Mapping[str, object], names: _StackedNames
) -> dict[str, StoredObject]:
    """Return the ShardedObjects: extra states per layer and expert, random states and others of the
    source.

    Each lies in the file of the first rank that has it.
    """
    topology = names.topology
    by_stage: dict[
        tuple[int, int | None], int
    ] = {}  # (stage, expert rank or None) → number of the first rank there
    by_rng: dict[tuple[int, ...], int] = {}
    for number, rank in enumerate(topology.ranks()):
        for ep_rank in (None, rank.ep):
            by_stage.setdefault((rank.pp, ep_rank), number)
        by_rng.setdefault((rank.pp, rank.tp), number)

    # Random states are for one rank of each (PP, TP); extra states for a layer and expert.
    objects: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        shard = sharded_object(key)
        if shard is not None:
            is_rng = shard[0] == RNG and shard[2] == (topology.pp, topology.tp)
            objects[key] = replace(item, coords=_file_coords(by_rng[shard[1]] if is_rng else 0))
    for key, value in states.items():
        if names.facts.kind is GPT and names.rules.layer_of(key) is None:
            continue  # GPT models leave out the output layer's
        name, tensor = names.of(key)
        offset, shape = (
            ".".join(map(str, tensor.at)) or "0",
            ".".join(map(str, tensor.shape)) or "1",
        )
        name = f"{name}/shard_{offset}_{shape}"
        objects[name] = StoredObject(
            name, value=[value], coords=_file_coords(by_stage[tensor.stage, tensor.ep])
        )
    return objects


def _notes_of_lost_states(states: Mapping[str, object], rules: Rules) -> list[str]:
    """Return a note for every extra state that torch_dist has no place for and that holds
    something.
    """
    return [
        f"{key} (torch_dist checkpoints of GPT models have no place for it)"
        for key, value in states.items()
        if value is not None and rules.layer_of(key) is None
    ]


def _common_state(
    catalog: Catalog,
    cuts: Mapping[str, Cut],
    rules: Rules,
    optimizer: StackedOptimizer,
    format: str,
) -> dict[object, object]:
    """Return the common state of a torch_dist checkpoint; its arguments keep the sizes of the run
    that saved.
    """
    padded = next(
        (cut.shape[0] for key, cut in cuts.items() if rules.rule_of(param_of(key)).kind == "vocab"),
        None,
    )
    changes: dict[str, object] = {"ckpt_format": format, "use_dist_ckpt": True}
    if padded is not None:
        changes["padded_vocab_size"] = padded
    common = {
        name: value for name, value in common_of(catalog).items() if name not in (OPTIMIZER, "args")
    }
    return {"args": replaced(catalog.args, changes), **common, **optimizer.common}


def _hidden_tensors(
    catalog: Catalog, common: Mapping[object, object], objects: Mapping[str, StoredObject]
) -> dict[str, TensorMeta]:
    """Return the tensors that the common state and the objects refer to."""
    values = (common, *(item.value for item in objects.values()))
    keys = [leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)]
    keys += [item.raw_key for item in objects.values() if item.raw_key is not None]
    return {key: catalog.meta(key) for key in keys}
