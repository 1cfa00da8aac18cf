"""Unshard global tensors: bring checkpoints with Megatron's names into the global per-layer form.

torch_dist stacks the layers of a homogeneous model (``decoder.layers.mlp.linear_fc2.weight``, (L,
rows, columns)) and the experts of a layer (``mlp.experts.experts.linear_fc2.weight``, (L, E, rows,
columns), or (E, rows, columns) in a model whose layers differ), names norms as Transformer Engine
fuses them, and stores every extra state as an object of its own. DCP and torch files have the keys
that the training script chose: usually per-layer ones, with the prefix ``model.``.

The result has the form described in ``core.megatron.reshard.from_ranks``, with the names that the
rank files of this model would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_unlisted
from core.engine.catalog.facets import MegatronModel, TorchDistFacts
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.errors import CheckpointingException, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.common_state import (
    OPTIMIZER,
    RNG,
    common_entries,
    get_checkpoint_version,
    get_iteration,
    record_dropped_optimizer,
    unwrap_shard,
)
from core.megatron.extras.order import by_place
from core.megatron.extras.sharded_objects import sharded_object
from core.megatron.model.args import parse_facts
from core.megatron.model.checks import (
    check_complete,
    check_shapes,
    gate_notes,
    sizes_for,
    with_gate,
)
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import cut_vocab, find_true_rows
from core.megatron.placement.fsdp_dtensor import from_fsdp_dtensor
from core.megatron.placement.joined import join_parts
from core.megatron.placement.origins import (
    Origin,
    meta_of,
    names_in,
    origins_of,
    place_tensors,
    record_padding,
    with_stacked_tower,
)
from core.megatron.rules.prefixes import numbered_names, prefix_of, without_prefix
from core.megatron.rules.rules import GPT, Rules
from core.pickle.inert import ObjectLeaf, TensorLeaf, walk
from core.values import dataclass

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
    """Return the global per-layer form of a catalog of global tensors.

    ``core.megatron.reshard.unshard.unshard`` explains the arguments and errors.
    """
    if is_one_rank(catalog, rules):
        raise UnsupportedError(
            "judging by the tensor shapes, this file is from one rank of a checkpoint; ckpt also "
            "needs the other ranks' files",
            hint="save each rank's file under its own name (mp_rank_00/model_optim_rng.pt, "
            "mp_rank_01/model_optim_rng.pt …), and pass the directory that contains them",
        )
    catalog = from_fsdp_dtensor(catalog, carries_optimizer=optim == "carry")
    catalog = join_parts(catalog, rules)
    prefix = prefix_of(catalog, rules)
    entries = _separate_entries(catalog)
    facts = parse_facts(
        entries.common.get("args"), names=rules.model_of(numbered_names(catalog, prefix, rules))
    )
    dropped: list[Dropped] = []
    carries_optimizer = entries.has_optimizer and optim == "carry"
    if entries.has_optimizer and not carries_optimizer:
        states = (tensor for key, tensor in catalog.tensors.items() if is_optimizer_key(key))
        kind = f"of {catalog.format}"
        dropped.append(record_dropped_optimizer(kind, states, optim=optim))

    # No version means version 0 only in rank files: other formats need not have the entry. In DCP
    # it may be an object that is not loaded, as in a forecast.
    version = entries.common.get("checkpoint_version")
    if version is not None and not isinstance(version, ObjectLeaf):
        get_checkpoint_version(entries.common)

    # The random states in the file of a single rank belong to no layout.
    keys = entries.model_keys(catalog)
    if prefix and any(map(is_random_state, keys)):
        keys = list(filterfalse(is_random_state, keys))
        dropped.append(Dropped((RNG,), "from only one rank; start Megatron with --no-load-rng"))

    # Tensors inside objects, such as random states, are carried or listed with these.
    of_model = {*keys}
    in_objects = {
        key: tensor
        for key, tensor in catalog.tensors.items()
        if key not in of_model and not is_optimizer_key(key)
    }
    dropped += dropped_unlisted(in_objects, "inside objects")

    # Find every tensor of the global form in the stored ones.
    stored = _find_tensors(
        catalog,
        {key: without_prefix(prefix, key, rules) for key in keys},
        facts,
        rules,
        vocab_size=vocab_size,
        keep_padded_vocab=keep_padded_vocab,
        target_tp=target_tp,
    )
    metas, origins = dict(stored.metas), dict(stored.origins)
    dropped += record_padding(catalog, origins, metas)

    # Extra states go under the names of their layers; some of them are tensors.
    objects = _rename_objects(catalog, entries, prefix, stored.facts, rules)
    for name, key in objects.tensors.items():
        meta = catalog.tensor(key)
        metas[name] = Tensor(meta.dtype, meta.shape)
        origins[name] = Origin((key,))
    tensors = place_tensors(catalog, origins, metas)

    # Rank files have a state of the output layer, which torch_dist has not.
    head_state = f"{GPT.output.removesuffix('weight')}{_EXTRA}"
    order = sorted({*metas, *objects.state_keys(), head_state}, key=by_place(rules))
    wrapper = rules.wrapper_in(prefix)
    megatron = MegatronModel(
        vocab_size=stored.n_rows,
        expert_names=facts.expert_names,
        wrapper=None if wrapper is None else wrapper.text,
        is_down_proj_cut=facts.is_mla and facts.is_local,
        order=tuple(order),
    )
    model = replace(
        catalog,
        tensors={name: tensors[name] for name in order if name in tensors},
        objects=objects.by_key,
        hidden={key: catalog.tensor(key) for key in entries.tensors | objects.hidden_keys()},
        skeleton=None,
        args=entries.common["args"],
        iteration=get_iteration(entries.common),
        common=entries.common,
        optimizer=None,
        files={},
        notes=(*catalog.notes, *stored.notes),
        dropped=(*catalog.dropped, *dropped),
        facets=_torch_dist_facet(catalog) | {Topology: facts.topology, MegatronModel: megatron},
    )
    if not carries_optimizer:
        return model
    from core.megatron.extras.schedule import with_schedule
    from core.megatron.optimizer.sharded.buckets import has_buckets
    from core.megatron.optimizer.sharded.proven_order import read_in_proven_order
    from core.megatron.optimizer.sharded.read import read_optimizer, with_states

    def read(model: Catalog, facts: ModelFacts) -> Catalog:
        entry = entries.optimizer
        states = read_optimizer(catalog, model, entry, facts, rules, prefix=prefix, store=store)
        return with_states(model, states)

    # Without values, the order of parameters in buffers is that of the arguments.
    if store is not None and has_buckets(catalog):
        return with_schedule(read_in_proven_order(model, stored.facts, rules, read=read))
    return with_schedule(read(model, stored.facts))


@dataclass(frozen=True, slots=True)
class _SeparatedEntries:
    """The entries of a checkpoint other than the model's tensors.

    Args:
        common: entries that stay in the common state, ``args`` among them.
        optimizer: the optimizer's entry, or None.
        has_optimizer: there is an optimizer's entry, or there are states without one.
        sharded: ShardedObjects among the entries, by key.
        tensors: keys of the tensors inside ``common`` and ``sharded``.
    """

    common: dict[object, object]
    optimizer: object
    has_optimizer: bool
    sharded: Mapping[str, object]
    tensors: set[str]

    def model_keys(self, catalog: Catalog) -> list[str]:
        """Return the keys of the model's own tensors."""
        return [
            key for key in catalog.tensors if not is_optimizer_key(key) and key not in self.tensors
        ]


def _separate_entries(catalog: Catalog) -> _SeparatedEntries:
    """Separate the top-level entries of a catalog by how resharding treats them."""
    entries = common_entries(catalog)
    optimizer = entries.pop(OPTIMIZER, None)
    sharded = {
        str(name): value for name, value in entries.items() if sharded_object(str(name)) is not None
    }
    common = {name: value for name, value in entries.items() if str(name) not in sharded}
    tensors = {leaf.key for leaf in walk([common, sharded]) if isinstance(leaf, TensorLeaf)}
    has_states = any(map(is_optimizer_key, [*catalog.tensors, *catalog.objects]))
    return _SeparatedEntries(
        common, optimizer, optimizer is not None or has_states, sharded, tensors
    )


@dataclass(frozen=True, slots=True)
class _StoredTensors:
    """The tensors of a model as a checkpoint stores them, under global per-layer names.

    Args:
        origins: name → the stored tensors that hold it.
        metas: name → dtype and shape, without dropped padding rows.
        n_rows: rows of the vocabulary without padding, or None if unknown.
        facts: facts from the arguments, with gated MLPs recognized by their shapes.
        notes: notes for the user.
    """

    origins: Mapping[str, Origin]
    metas: Mapping[str, Tensor]
    n_rows: int | None
    facts: ModelFacts
    notes: Sequence[str]


def _find_tensors(
    catalog: Catalog,
    names: Mapping[str, str],
    facts: ModelFacts,
    rules: Rules,
    *,
    vocab_size: int | None,
    keep_padded_vocab: bool,
    target_tp: int | None,
) -> _StoredTensors:
    """Find every tensor of the model in the stored ones, and check names and shapes.

    Args:
        names: stored key → Megatron's name.

    Raises:
        MissingShardError: a layer or a tensor is missing.
        CorruptError: two stored tensors are the same one of the model, a stack's extents are not
            the model's, or shapes contradict the arguments.
        UnknownTensorError: no rule matches a name.
        UsageError: ``vocab_size`` does not fit the stored rows.
    """
    facts = with_stacked_tower(facts, catalog, names)
    origins = origins_of(catalog, names, facts, rules)
    tensors = {name: meta_of(catalog, name, origin) for name, origin in origins.items()}
    check_complete(tensors, facts, rules)
    gated_facts = with_gate(facts, {name: tensor.shape for name, tensor in tensors.items()})

    # Find the size of the vocabulary, check all shapes with their padding, and then drop it.
    vocab_shapes = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if rules.is_vocabulary(name, tensor.shape)
    }
    true_rows = find_true_rows(
        gated_facts,
        given=vocab_size,
        keep_padded=keep_padded_vocab,
        stored=[shape[0] for shape in vocab_shapes.values() if shape],
    )
    check_shapes(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: rules.rule_of(name) for name in tensors},
        gated_facts,
    )
    cut = cut_vocab(vocab_shapes, gated_facts, n_rows=true_rows.n_rows, target_tp=target_tp)
    tensors |= {name: replace(tensors[name], shape=shape) for name, shape in cut.shapes.items()}
    notes = [*gate_notes(facts, gated_facts), *true_rows.notes, *cut.notes]
    return _StoredTensors(origins, tensors, true_rows.n_rows, gated_facts, notes)


def is_one_rank(catalog: Catalog, rules: Rules) -> bool:
    """Return whether a torch file with Megatron's names is the file of one of several ranks.

    Such a file is known by its name, unless somebody renamed it. Then its shapes show it: they are
    shares of those that the arguments give, or it has one stage's layers or one rank's experts.

    Args:
        catalog: a catalog for which ``is_megatron`` is true.
    """
    if catalog.format != "torch":
        return False
    prefix = prefix_of(catalog, rules)
    names = {
        key.removeprefix(prefix): tensor.shape
        for key, tensor in catalog.tensors.items()
        if key.startswith(prefix)
    }
    model = rules.model_of(names)
    try:
        facts = parse_facts(common_entries(catalog).get("args"), names=model)
        topology = facts.topology
        stages = facts.stages(topology.pp, topology.vpp)
    except CheckpointingException:
        return False  # arguments that contradict each other prove nothing

    # Compare the tensors whose extent on the cut axis follows from the arguments.
    has_share = has_all = False
    experts: set[int] = set()
    for name, shape in names.items():
        if rules.layer_of(name) is None:
            continue
        expert = rules.expert_of(name)
        if expert is not None:
            experts.add(expert.number or 0)
            name = expert.numbered(expert.number or 0)
        rule = rules.find_rule(name)
        axis = None if rule is None else rule.cut_axis
        if rule is None or axis is None or axis >= min(len(shape), len(rule.shape)):
            continue
        size, n = rule.shape[axis], topology.size_of(rule.group)
        expected = None if size is None else size.value(sizes_for(name, facts))
        has_all |= shape[axis] == expected
        has_share |= n > 1 and shape[axis] * n == expected
    is_whole = topology.tp > 1 and has_all
    if has_share or is_whole:
        return not is_whole

    # With one tensor parallel rank, a rank has a part of the layers or of the experts.
    stack = facts.kind.stacks[0]
    n_seen = model.n_seen.get(stack, 0)
    counts = {stages.count(stack, 0, pp) for pp in range(topology.pp)}
    is_stage = topology.pp > 1 and n_seen < facts.n_layers and n_seen in counts
    n_experts = facts.n_experts or 0
    has_some = topology.ep > 1 and experts == set(range(n_experts // topology.ep))
    return is_stage or has_some


def _torch_dist_facet(catalog: Catalog) -> dict[type, object]:
    """Return the facet that torch_dist writes again, by class; {} for other formats.

    The facts about the optimizer's tensors are emptied: they describe their old shapes.
    """
    facts = catalog.facet(TorchDistFacts)
    if facts is None:
        return {}
    if facts.mcore_data is not None:
        mcore_data = {
            key: {} if is_optimizer_key(key) else entry for key, entry in facts.mcore_data.items()
        }
        facts = replace(facts, mcore_data=mcore_data)
    return {TorchDistFacts: facts}


def is_random_state(key: str) -> bool:
    """Return whether a tensor belongs to the random states of a single rank's file."""
    return key == RNG or key.startswith(RNG + ".")


@dataclass(frozen=True, slots=True)
class _RenamedObjects:
    """The objects of a checkpoint under the keys of the global form.

    Args:
        by_key: new key → object.
        tensors: new key → key of the hidden tensor, for extra states that are tensors.
    """

    by_key: dict[str, StoredObject]
    tensors: dict[str, str]

    def state_keys(self) -> list[str]:
        """Return the keys of the extra states that are not tensors."""
        return [key for key in self.by_key if key.endswith(_EXTRA)]

    def hidden_keys(self) -> set[str]:
        """Return the keys of the hidden tensors that the objects refer to."""
        values = [item.value for item in self.by_key.values()]
        raw = {item.raw_key for item in self.by_key.values() if item.raw_key is not None}
        return raw | {leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)}


def _rename_objects(
    catalog: Catalog, entries: _SeparatedEntries, prefix: str, facts: ModelFacts, rules: Rules
) -> _RenamedObjects:
    """Give extra states the names of their layers.

    Random states and other ShardedObjects of single ranks keep their keys. Plain objects are in the
    common state and are not repeated here.

    Raises:
        UnknownTensorError: no rule matches an extra state.
    """
    sharded = {key: StoredObject(key, value=value) for key, value in entries.sharded.items()}
    objects: dict[str, StoredObject] = {}
    tensors: dict[str, str] = {}
    # The extra states of a stack share its list of names, which is as long as the stack.
    members: dict[str, Mapping[tuple[int, ...], str]] = {}
    for key, item in {**catalog.objects, **sharded}.items():
        shard = sharded_object(key)
        stored_name, index = (key, ()) if shard is None else shard[:2]
        is_state = stored_name.endswith(_EXTRA)
        if is_optimizer_key(key) or not (is_state or shard):
            continue

        # Find the layer and expert of an extra state by its index in the stack; objects that are
        # not loaded, or of layers that the model does not have, keep their keys.
        name = None
        if is_state and item.raw_key is None:
            names = members.get(stored_name)
            if names is None:
                names = dict(names_in(stored_name.removeprefix(prefix), facts, rules))
                members[stored_name] = names
            depth = len(next(iter(names)))
            # A tower's stack of layers is one tensor, but each of its layers has a state.
            is_of_stack = shard is not None and any(n > 1 for n in shard[2])
            name = names.get(index[:depth]) if depth or not is_of_stack else None
        if name is None:
            objects[key] = item
            continue
        rules.rule_of(name)

        value = item.value if shard is None else unwrap_shard(item.value)
        if isinstance(value, TensorLeaf):
            tensors[name] = value.key
        else:
            objects[name] = StoredObject(name, value=value)
    return _RenamedObjects(objects, tensors)
