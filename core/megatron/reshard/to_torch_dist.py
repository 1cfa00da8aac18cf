"""Write the global per-layer form as torch_dist: stacked keys, fused names, one chunk per shard.

Megatron writes for a rank (TP rank r, pipeline stage p) of a homogeneous model::

    decoder.layers.mlp.linear_fc2.weight                  (L, rows, columns)
        one chunk (1, rows, columns / TP) per layer of the stage
    decoder.layers.mlp.linear_fc1.weight                  (L, 2F, columns)
        gated: two chunks per layer, one of gate rows and one of up rows
    decoder.layers.mlp.experts.experts.linear_fc2.weight  (L, E, rows, columns)
        one chunk per layer of the stage and expert of the rank
    decoder.final_layernorm.weight                        (rows,)
        replicated: one chunk, from TP rank 0
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_8
        object: the extra state of layer 3 of 8, in a list

Models whose layers differ, or may differ (``moe_layer_freq``), have one key per layer:
``decoder.layers.3.mlp.experts.experts.linear_fc2.weight`` (E, rows, columns). The output layer of a
GPT model has no extra state and, where embeddings are tied, no weight. The names of a text model
with towers beside it begin with ``language_model.`` (``Rules.wrappers``); the layers of LLaVA's
tower are stacked like the text model's. The states of an optimizer are stacked, cut and named like
their parameters (``core.megatron.optimizer.sharded.write``).

Source: Megatron-LM d98e8a64 and megatron-core 0.16.1, pinned in tests/golden
    (``mcore*_torch_dist``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.facets import MegatronModel, TorchDistFacts
from core.engine.catalog.optimizer_keys import param_of
from core.engine.catalog.stored import Coords, PlannedArray, array_name
from core.engine.catalog.tensor import (
    Fragment,
    TargetFragment,
    TargetTensor,
    Tensor,
    bind_argument,
    tensors_of,
)
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER, RNG, get_common_state
from core.megatron.extras.extra_states import requested_states
from core.megatron.extras.sharded_objects import sharded_object
from core.megatron.model.args import parse_facts, replaced
from core.megatron.model.cut import (
    Cut,
    check_head_gates,
    check_parallel_sizes,
    check_towers,
    cuts_of,
)
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.parts import with_sizes
from core.megatron.model.pipeline import Stages
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.sharded.write import StackedOptimizer
from core.megatron.placement.adapter_rows import is_halved, to_stored_order
from core.megatron.placement.joined import separate_parts
from core.megatron.rules.rules import GPT, LLAVA_LAYERS, Rules, Wrapper, tower_layer_of
from core.pickle.inert import TensorLeaf, walk
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Stacked:
    """A checkpoint in torch_dist's schema.

    Args:
        source: the source's tensors under torch_dist's keys, from which the target is filled.
        target: the chunks to write; tensors with padding that the source lacks are flexible.
    """

    source: Catalog
    target: TargetCatalog


@dataclass(frozen=True, slots=True)
class _StackedTensor:
    """A per-layer tensor inside a stacked one.

    Args:
        key: global name of the per-layer tensor.
        at: its index on the stacking axes: (), (layer,), (expert,) or (layer, expert).
        shape: extents of the stacking axes.
        stage: the pipeline stage that holds it.
        ep: the expert parallel rank that holds it, or None if all do.
    """

    key: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    stage: int
    ep: int | None = None

    def box(self, box: Box) -> Box:
        """Return a box of the per-layer tensor in the coordinates of the stacked one."""
        return Box((*self.at, *box.offset), (*(1 for _ in self.at), *box.shape))


def to_torch_dist(
    catalog: Catalog,
    topology: Topology,
    *,
    rules: Rules,
    vocab_size: int | None = None,
    format: str = "torch_dist",
    is_stacked: bool | None = None,
) -> Stacked:
    """Return the source and target catalogs of a torch_dist checkpoint.

    The training arguments keep the sizes of the run that saved (``core.megatron.model.args``
    explains why): torch_dist loads at any sizes.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: the ranks whose chunks to write, numbered as in ``Topology.ranks``.
        rules: the layout's rules.
        vocab_size: rows of the vocabulary without padding; None takes the number that ``unshard``
            found.
        format: ``torch_dist`` or ``zarr``; the optimizer's state gets the form that readers of that
            format load.
        is_stacked: True for one key for all layers, False for one key per layer; None for
            Megatron's choice for such a model.

    Raises:
        UsageError: layers that differ are to be stacked.
        UnsupportedError: a model of megatron.legacy, sizes that do not divide, or optimizer states
            of only some tensors in a stack.
        UnknownTensorError: no rule matches a name.
        CorruptError: shapes and arguments contradict each other.
    """
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
    if facts.kind.is_legacy:
        raise UnsupportedError(
            "megatron.legacy models exist only as rank files, because Megatron-LM cannot save them "
            "as torch_dist",
            hint="use --to megatron",
        )
    check_parallel_sizes(topology, facts)
    check_towers(catalog, format)
    check_head_gates(catalog.args, format)
    stages = facts.stages(topology.pp, topology.vpp, pipeline=topology.pipeline)
    catalog = _with_stored_rows(catalog, topology, facts)

    # Decide how every tensor is cut; opaque ones become objects.
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))
    opaque = [key for key in cuts if rules.rule_of(param_of(key)).kind == "opaque"]
    for key in opaque:
        del cuts[key]
    described = catalog.facet(MegatronModel)
    wrapper = rules.wrapper_in(None if described is None else described.wrapper)
    states, dropped = _extra_states(catalog, opaque, facts, rules, wrapper)

    # Decide whether layers share a key. Megatron does not stack all models whose layers are alike.
    can_stack = _is_homogeneous(catalog, cuts, stages, rules)
    stacks_tower = is_stacked is not False
    if is_stacked is None:
        is_stacked = can_stack and facts.is_stacked
    elif is_stacked and not can_stack:
        raise UsageError(
            "--stack-layers: the layers differ, so they cannot share a key",
            hint="omit --stack-layers",
        )

    # Collect the tensors of every key; the optimizer decides how keys of its states are named.
    in_tower = [layer.number for layer in map(tower_layer_of, catalog.tensors) if layer is not None]
    n_tower_layers = max(in_tower, default=-1) + 1 if stacks_tower else 0
    names = _StackedNames(stages, topology, facts, rules, is_stacked, wrapper, n_tower_layers)
    target = None
    if catalog.optimizer is not None:
        from core.megatron.optimizer.reshard_target import ReshardTarget

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

    # Collect the objects, the common state, and the tensors to which they refer.
    objects, dropped_objects = _sharded_objects(catalog, states, names)
    common = _common_state(catalog, cuts, rules, optimizer, format)
    values = (common, *(item.value for item in objects.values()))
    keys = [leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)]
    keys += [item.raw_key for item in objects.values() if item.raw_key is not None]
    hidden = {key: catalog.tensor(key) for key in keys}
    notes = [*catalog.notes, *optimizer.notes]
    if topology != facts.topology:
        notes.append(
            f"the chunks are for {topology}, but the arguments are still for {facts.topology}; "
            "Megatron can load the checkpoint with any parallel sizes"
        )
    if facts.has_unused_head(topology):
        notes.append(
            "with tied embeddings, Megatron can load torch_dist only if multi-token prediction is "
            "in a stage before the last, or if there is only one pipeline stage"
        )

    # The other facts of a torch_dist source are kept.
    facets: dict[type, object] = {Topology: topology}
    torch_dist = catalog.facet(TorchDistFacts)
    if torch_dist is not None:
        dialect = "common_pt" if optimizer.needs_common_file else torch_dist.dialect
        facets[TorchDistFacts] = replace(torch_dist, dialect=dialect)

    source_catalog = replace(
        catalog,
        tensors=model.source_tensors(),
        objects=objects,
        hidden=hidden,
        notes=tuple(notes),
    )
    target_catalog: TargetCatalog = Catalog(
        format="torch_dist",
        version=None,
        tensors=model.target_tensors(),
        objects=objects,
        hidden=tensors_of(
            {key: PlannedArray(key, tensor.dtype, tensor.shape) for key, tensor in hidden.items()}
        ),
        args=common["args"],
        common=common,
        iteration=catalog.iteration,
        notes=tuple(notes),
        dropped=(*catalog.dropped, *dropped, *dropped_objects),
        write=catalog.write,
        facets=facets,
    )

    # Mamba's and similar parameters are one tensor per part in torch_dist.
    facts = with_sizes(
        facts,
        {key: tensor.shape for key, tensor in catalog.tensors.items() if param_of(key) == key},
        rules,
    )
    return Stacked(
        separate_parts(source_catalog, facts, rules, is_target=False),
        separate_parts(target_catalog, facts, rules, is_target=True),
    )


@dataclass(frozen=True, slots=True)
class _StackedNames:
    """A finder of the tensors' keys in torch_dist, and of the ranks that write them.

    Args:
        is_stacked: layers share a key.
        wrapper: names of the model of which the text model is a part, or None.
        n_tower_layers: number of layers of LLaVA's tower that share a key; 0 if none do.
    """

    stages: Stages
    topology: Topology
    facts: ModelFacts
    rules: Rules
    is_stacked: bool
    wrapper: Wrapper | None = None
    n_tower_layers: int = 0

    def of(self, key: str) -> tuple[str, _StackedTensor]:
        """Return (key in torch_dist, the tensor's place in it) for a global name."""
        name, tensor = self._of_text(key)
        return name if self.wrapper is None else self.wrapper.wrapped(name), tensor

    def _of_text(self, key: str) -> tuple[str, _StackedTensor]:
        """Return the same for a model without towers."""
        rules = self.rules
        tower_layer = tower_layer_of(key)
        if self.n_tower_layers and tower_layer is not None:
            axes_of_tower = (tower_layer.number,), (self.n_tower_layers,)
            _, stage = self.stages.chunk_at("first")
            return LLAVA_LAYERS + tower_layer.sub, _StackedTensor(key, *axes_of_tower, stage)
        layer = rules.layer_of(key)
        if layer is None:
            _, stage = self.stages.chunk_at(rules.stage_of(key) or "last")
            return key, _StackedTensor(key, (), (), stage)

        # Norms have Transformer Engine's fused names in torch_dist, whichever implementation saved.
        sub = layer.sub
        if self.facts.fuses_names:
            blocks = self.facts.blocks_of(layer.stack, layer.number)
            own = () if blocks is None else blocks.linear_norm_names()
            sub = rules.fused(sub, own=own)
        sub = rules.in_torch_dist(sub, has_own_inner_name=self.facts.pattern is None)

        # Layers of multi-token prediction are never stacked.
        _, stage, _ = self.stages.chunk_of(layer.stack, layer.number)
        is_stacked = self.is_stacked and layer.stack != PREDICTION_STACK
        name = layer.stack + sub if is_stacked else str(replace(layer, sub=sub))
        axes = [(layer.number, self.stages.n_layers(layer.stack))] if is_stacked else []

        # The experts of a layer are always stacked, and each is written by one EP rank.
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
    """Return whether all layers of the main stack have the same tensors, of equal dtype and shape.

    Layers with tensors that Megatron never stacks (``Rules.unstacked``) are not homogeneous either.
    """
    tensors: dict[tuple[str, str], list[Tensor]] = {}
    for key in cuts:
        # ``layer_of`` is None for an optimizer's states, too, which follow their parameters.
        layer = rules.layer_of(key)
        if layer is None or layer.stack == PREDICTION_STACK:
            continue
        if layer.sub.startswith(rules.unstacked):
            return False
        tensors.setdefault((layer.stack, layer.sub), []).append(catalog.tensors[key])
    return all(
        len(group) == stages.n_layers(name)
        and len({(tensor.dtype, tensor.shape) for tensor in group}) == 1
        for (name, _), group in tensors.items()
    )


def _group_tensors(
    cuts: Iterable[str], names: _StackedNames, optimizer: StackedOptimizer
) -> dict[str, list[_StackedTensor]]:
    """Group tensors by their key in torch_dist, each group in the order of the global keys.

    Raises:
        UnsupportedError: a stack lacks layers or experts, because the optimizer has states only for
            some of them.
    """
    groups: dict[str, list[_StackedTensor]] = {}
    for key in cuts:
        name, tensor = names.of(param_of(key))
        groups.setdefault(optimizer.key(key, name), []).append(replace(tensor, key=key))
    for name, group in groups.items():
        n_expected = prod(group[0].shape)
        if len(group) != n_expected:
            raise UnsupportedError(
                f"the checkpoint has only {len(group)} of the {n_expected} tensors to stack, "
                "probably because the other tensors were not trained",
                key=name,
                hint="drop the optimizer with --no-optim",
            )
    return groups


@dataclass(frozen=True, slots=True)
class _StackedModel:
    """The tensors of a model under torch_dist's keys.

    Args:
        catalog: the global per-layer form.
        topology: the ranks that write.
        cuts: global key → how the tensor is cut.
        groups: key in torch_dist → the tensors that it stacks.
    """

    catalog: Catalog
    topology: Topology
    cuts: Mapping[str, Cut]
    groups: Mapping[str, Sequence[_StackedTensor]]

    def source_tensors(self) -> dict[str, Tensor]:
        """Return the tensor of every key in the source."""
        tensors: dict[str, Tensor] = {}
        for key, group in self.groups.items():
            first = self.catalog.tensors[group[0].key]
            shape, fragments = (*group[0].shape, *first.shape), self._source_fragments
            tensors[key] = replace(first, shape=shape, tiling=bind_argument(fragments, key))
        return tensors

    def target_tensors(self) -> dict[str, TargetTensor]:
        """Return the tensor of every key in the destination, which pads the vocabulary."""
        tensors: dict[str, TargetTensor] = {}
        for key, group in self.groups.items():
            first: Any = self.catalog.tensors[group[0].key]
            of_layer = self.cuts[group[0].key].shape
            tensors[key] = replace(
                first,
                shape=(*group[0].shape, *of_layer),
                tiling=bind_argument(self._target_fragments, key),
                flexible=of_layer != first.shape,
            )
        return tensors

    def _source_fragments(self, key: str) -> Sequence[Fragment]:
        """Return the source's fragments of the tensors that a key stacks."""
        return tuple(
            replace(piece, box=tensor.box(piece.box))
            for tensor in self.groups[key]
            for piece in self.catalog.fragments(tensor.key)
        )

    def _target_fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the chunks of a key, each from the first rank that holds it, in rank order."""
        # A rank writes the tensors of its stage, and of its experts; of equal boxes, which are
        # replicas, only the first.
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
                        chunks[box] = Fragment(box, array, (0,) * len(box.shape))
        return tuple(chunks.values())


def _file_coords(number: int) -> Coords:
    """Return the coordinates of the file that the rank of this number writes."""
    return (("file", number),)


def _with_stored_rows(catalog: Catalog, topology: Topology, facts: ModelFacts) -> Catalog:
    """Return the catalog with rows in the order that readers expect at the arguments' TP size.

    Raises:
        UnsupportedError: the order depends on TP, and the arguments keep another size.
    """
    key = next(filter(is_halved, catalog.tensors), None)
    if key is None:
        return catalog
    tp = facts.topology.tp
    if topology.tp != tp:
        raise UnsupportedError(
            "in torch_dist, this adapter's row order depends on the tensor parallel size, and "
            f"Megatron-Bridge can load it only with the arguments' size, {tp}, not {topology.tp}",
            key=key,
            hint="use --to megatron, or use --to hf and convert the result with "
            f"--tp-new {topology.tp}",
        )
    return to_stored_order(catalog, tp)


def _extra_states(
    catalog: Catalog,
    tensors: Iterable[str],
    facts: ModelFacts,
    rules: Rules,
    wrapper: Wrapper | None,
) -> tuple[dict[str, object], list[Dropped]]:
    """Return the extra states by global name, one for each grouped expert, and what is dropped.

    A model for Transformer Engine that it has not saved gets the empty states that Megatron
    requests.

    Transformer Engine packs the states of all experts of a rank into one, which cannot be separated
    here. An empty one is empty for each expert; another one is dropped.

    Args:
        tensors: keys of states that are tensors.
        wrapper: names of the model of which the text model is a part, or None.
    """
    # States are tensors or objects; ShardedObjects have their final form already.
    values: dict[str, object] = {key: TensorLeaf(key) for key in tensors}
    values |= {
        key: item.value
        for key, item in catalog.objects.items()
        if key.endswith(EXTRA_STATE) and item.raw_key is None and sharded_object(key) is None
    }

    # What Transformer Engine saved has its states: those of its version. Other sources have none,
    # or the empty ones of the local implementation. Towers have the states of their source.
    if not facts.is_local and all(value is None for value in values.values()):
        towers = () if wrapper is None else wrapper.towers
        parameters = (
            key for key in catalog.tensors if param_of(key) == key and not key.startswith(towers)
        )
        for key in requested_states(parameters):
            values.setdefault(key, None)

    # Separate packed states.
    states: dict[str, object] = {}
    dropped: list[Dropped] = []
    for key, value in values.items():
        expert = rules.expert_of(key)
        if expert is None or not rules.is_packed_state(key):
            states[key] = value
            continue
        if value is not None and (key not in catalog.tensors or catalog.tensors[key].n_elements):
            dropped += dropped_each(
                (key,), "packed together with the rank's other experts", catalog.tensors
            )
        states |= {expert.numbered(number): None for number in range(facts.n_experts or 0)}
    return states, dropped


def _sharded_objects(
    catalog: Catalog, states: Mapping[str, object], names: _StackedNames
) -> tuple[dict[str, StoredObject], list[Dropped]]:
    """Return the ShardedObjects of a checkpoint by their keys, and what is dropped.

    They are extra states per layer and expert, random states and others of the source.

    Each is stored in the file of the first rank that has it.

    Args:
        states: extra states by global name.
    """
    # Number the first rank of each (stage, EP rank or None for all), and of each (PP, TP) rank.
    topology = names.topology
    by_stage: dict[tuple[int, int | None], int] = {}
    by_rng: dict[tuple[int, ...], int] = {}
    for number, rank in enumerate(topology.ranks()):
        for ep_rank in (None, rank.ep):
            by_stage.setdefault((rank.pp, ep_rank), number)
        by_rng.setdefault((rank.pp, rank.tp), number)

    # ShardedObjects of the source keep their keys. A random state is that of one (PP, TP) rank.
    objects: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        shard = sharded_object(key)
        if shard is not None:
            is_rng = shard[0] == RNG and shard[2] == (topology.pp, topology.tp)
            objects[key] = replace(item, coords=_file_coords(by_rng[shard[1]] if is_rng else 0))

    # An extra state is that of a layer and expert. Of a GPT model's output layer none is saved.
    dropped: list[Dropped] = []
    head = f"{GPT.head.removesuffix('weight')}{EXTRA_STATE}"
    for key, value in states.items():
        if names.facts.kind is GPT and key == head:
            if value is not None:
                reason = "cannot be stored in torch_dist checkpoints of GPT models"
                dropped += dropped_each((key,), reason, catalog.tensors)
            continue
        name, tensor = names.of(key)
        offset = ".".join(map(str, tensor.at)) or "0"
        shape = ".".join(map(str, tensor.shape)) or "1"
        name = f"{name}/shard_{offset}_{shape}"
        if name not in objects:
            objects[name] = StoredObject(
                name, value=[value], coords=_file_coords(by_stage[tensor.stage, tensor.ep])
            )
    return objects, dropped


def _common_state(
    catalog: Catalog,
    cuts: Mapping[str, Cut],
    rules: Rules,
    optimizer: StackedOptimizer,
    format: str,
) -> dict[object, object]:
    """Return the common state of a torch_dist checkpoint.

    Its arguments describe the destination's format and vocabulary, but the sizes of the run that
    saved.
    """
    changes: dict[str, object] = {"ckpt_format": format, "use_dist_ckpt": True}
    for key, cut in cuts.items():
        if rules.is_vocabulary(param_of(key), cut.shape):
            changes["padded_vocab_size"] = cut.shape[0]
            break
    common = {
        name: value
        for name, value in get_common_state(catalog).items()
        if name not in (OPTIMIZER, "args")
    }
    return {"args": replaced(catalog.args, changes), **common, **optimizer.common}
