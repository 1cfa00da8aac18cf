"""From rank-local names and shapes to global ones: the rank files of a Megatron checkpoint as one model.

The result is the *global per-layer form*, which ``core.layout_shard`` and ``core.layout_stack`` take. Keys are names
as rank files have them, without ``model.``; layers and experts are numbered over the whole model, shapes are those
of the whole tensors, and there is one fragment for every piece that a rank holds. What several ranks hold gives several
fragments with one box; the engine compares them::

    decoder.layers.3.input_layernorm.weight                          or self_attention.linear_qkv.layer_norm_weight,
                                                                     whichever the model's rank files have
    decoder.layers.3.mlp.router.weight
    decoder.layers.3.mlp.shared_experts.linear_fc1.weight            gated: all gate rows, then all up rows
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight  always this form, whatever rank files say

An optimizer's states stand beside them, see ``core.optimizer``.

attrs of the result (required ones first):

* ``family`` ("megatron") and ``args``: the training arguments; ``core.layout_args.facts_of`` says which ones matter;
* ``iteration``, ``checkpoint_version``, ``topology`` (of the source);
* ``common``: the other top-level entries, by name, ``args`` among them (``core.layout_state``);
* ``optimizer``: ``core.optimizer.Optimizer``, or None;
* ``vocab_size``: rows of the true vocabulary, None where nothing says;
* ``expert_names``: how rank files name experts, and None without experts: ``sequential``
  (``experts.local_experts.3.linear_fc1.weight``), ``te_grouped`` (``experts.linear_fc1.weight3``) or ``grouped``
  (``experts.weight1``, of older Megatron: read, but written as ``sequential``). Absent: what the arguments say;
* ``is_down_proj_cut``: multi-latent attention's down projections are cut over TP, as by the local implementation;
  absent means that they are not;
* ``rng_states``: rank → its random states, where the source is rank files;
* ``notes``: what the user should know; ``dropped``: ``entry (reason)`` of what is left out;
* ``order``: names of tensors and extra states in the order of the files; absent: as Megatron makes them;
* ``module_versions``, ``is_ordered``, ``nesting`` (``core.layout_nested``), ``top_level``: how the files' dicts look;
  absent: as Megatron makes them.

Objects: extra states per layer, and random states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.box import Shape
from core.catalog import Catalog, Coords, Fragment, StoredArray, StoredObject, TensorMeta, metas_of, whole_fragment
from core.errors import CorruptError, MissingShardError, UnknownTensorError, UnsupportedError
from core.inert import Global, Inert, TensorLeaf, as_mapping, walk
from core.layout_args import facts_of
from core.layout_checks import check_complete, check_predictions, check_shape, extent_of, fc2_of, gate_notes, listed
from core.layout_chunk import Chunk, chunk_of
from core.layout_extra import disagreement
from core.layout_facts import Facts
from core.layout_nested import flattened
from core.layout_parts import check_parts, parts_of, with_sizes
from core.layout_rng import RNG_STATES
from core.layout_rules import Rule, Rules
from core.layout_state import (
    EXTRA_STATE,
    OLDEST,
    OPTIMIZER,
    beside,
    check_version,
    is_chunk,
    is_ordered,
    iteration_of,
    refuse_or_drop_optimizer,
    same,
    texts_of,
)
from core.layout_versions import CURRENT, OldRows, old_rows
from core.layout_vocab import cut_vocab, vocab_rows
from core.optim_ranks import Param, ParamState, RankFile, RankStates, read_states
from core.optimizer import STEP, param_of, state_key
from core.placement import Piece, global_shape, replicated, split, trimmed
from core.stages import Stages
from core.store import ReadStore
from core.topology import Rank, Topology


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds of a tensor."""

    rank: Rank
    folder: str
    array: StoredArray


@dataclass(slots=True)
class _Tensor:
    """A global tensor under construction."""

    rule: Rule
    held: list[_Held] = field(default_factory=list)
    old_rows: OldRows | None = None


@dataclass(slots=True)
class _Model:
    """All chunks of all ranks, merged by name; ``order`` and ``module_order`` tell where names stand in the model."""

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    extra_states: dict[str, list[object]] = field(default_factory=dict)
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    module_order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expert_names: str | None = None
    files: dict[Rank, RankFile] = field(default_factory=dict)


def unshard_ranks(
    catalog: Catalog,
    *,
    rules: Rules,
    vocab_size: int | None,
    optim: str,
    keep_padded_vocab: bool,
    target_tp: int | None,
    store: ReadStore | None,
) -> Catalog:
    """The global form of a rank catalog; see ``core.layout.unshard``."""
    if catalog.attrs.get("is_single_rank"):
        raise UnsupportedError(
            "this is one rank of a checkpoint; the others are needed as well",
            hint="point at the directory that holds the rank directories",
        )
    ranks = _ranks_of(catalog)
    facts = facts_of(catalog.attrs.get("args"), names=rules.model_of(_local_names(ranks)))
    check_predictions(facts, facts.topology)
    notes: list[str] = []
    dropped: list[str] = []
    model = _merged(catalog, ranks, facts, rules)
    check_complete(model.tensors, facts, rules)
    others = beside(ranks, facts.topology, dropped)
    common, objects = others.common, others.objects
    version = check_version(common, has_old_names=facts.kind.is_legacy)
    _settle_states(model, store, dropped)
    is_down_proj_cut = _settle_rules(model, facts)
    found = _optimizer(catalog, model, facts, rules, store=store, optim=optim, dropped=dropped)
    states = {} if found is None else _states(found.states, model, facts)
    copies: dict[str, Sequence[StoredArray]] = {} if found is None else dict(found.beside)
    if found is not None and found.steps:
        copies[STEP] = found.steps
    if found is not None:
        notes += found.notes
        dropped += found.dropped
    n_rows = _vocab_rows(facts, given=vocab_size, keep_padded=keep_padded_vocab, model=model, notes=notes)
    stored = {name: _checked_shape(name, tensor, facts.topology) for name, tensor in model.tensors.items()}
    said, facts = facts, with_sizes(facts, stored, rules)
    notes += gate_notes(said, facts)
    order = sorted(model.order, key=model.order.__getitem__)
    shapes: dict[str, Shape] = {}
    for name in order:
        if name in stored:
            rule = model.tensors[name].rule
            shapes[name] = shape = stored[name]
            check_shape(name, shape, stored.get(fc2_of(name)), rule, facts)
            check_parts(rule, shape, facts, key=name)
            if rule.kind == "vocab":
                shapes[name] = cut_vocab(shape, name, facts, n_rows=n_rows, target_tp=target_tp, notes=notes)
    for key, state in states.items():
        _checked_shape(key, state, facts.topology, like=model.tensors[param_of(key)])
        shapes[key] = shapes[param_of(key)]
    tensors = {**model.tensors, **states}
    if version < OLDEST:
        _set_old_rows(tensors, version, facts)
        common["checkpoint_version"] = CURRENT
        notes.append(
            f"rows of query, key and value are now in the order of checkpoint_version {CURRENT}, not {version}"
        )

    cut: dict[object, list[Piece]] = {}

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in copies:
            return tuple(whole_fragment(key, one) for one in copies[key])
        tensor = tensors.get(key)
        if tensor is None:
            return catalog.fragments(key)
        return tuple(_fragments(key, tensor, shapes[key], facts, cut))

    objects |= {name: StoredObject(name, value=values[0]) for name, values in model.extra_states.items()}
    parts = (common, *(item.value for item in objects.values()), *others.rng_states.values())
    inside = [leaf.key for leaf in walk(parts) if isinstance(leaf, TensorLeaf)]
    root = as_mapping(next(iter(ranks.values()))[1]) or {}
    first_chunk = next((value for key, value in root.items() if is_chunk(key)), None)
    modules = sorted(model.versions, key=model.module_order.__getitem__)
    return replace(
        catalog,
        tensors={name: TensorMeta(name, tensors[name].held[0].array.dtype, shapes[name]) for name in shapes},
        objects=objects,
        hidden={key: catalog.meta(key) for key in inside}
        | metas_of({key: arrays[0] for key, arrays in copies.items()}),
        fragments_of=fragments_of,
        skeleton=None,
        attrs={
            "family": "megatron",
            "args": catalog.attrs["args"],
            "iteration": iteration_of(common),
            "checkpoint_version": common.get("checkpoint_version"),
            "topology": facts.topology,
            "common": common,
            OPTIMIZER: None if found is None else found.optimizer,
            "vocab_size": n_rows,
            "expert_names": model.expert_names,
            "is_down_proj_cut": is_down_proj_cut,
            "notes": [*texts_of(catalog, "notes"), *notes],
            "dropped": dropped,
            RNG_STATES: others.rng_states,
            "order": tuple(order),
            "module_versions": {name: model.versions[name] for name in modules},
            "nesting": {name: is_dict for name, is_dict in model.nesting.items() if name},
            "is_ordered": is_ordered(first_chunk),
            "top_level": tuple(dict.fromkeys("model" if is_chunk(key) else key for key in root)),
        },
    )


def _ranks_of(catalog: Catalog) -> Mapping[Coords, tuple[str, object]]:
    ranks = catalog.attrs.get("ranks")
    assert isinstance(ranks, Mapping), "a rank catalog lists its ranks"
    return ranks


def _local_names(ranks: Mapping[Coords, tuple[str, object]]) -> Iterator[str]:
    """The names in all chunks of every pipeline stage, from one of its ranks."""
    stages = {dict(coords).get("pp"): found for coords, found in ranks.items()}
    for folder, root in stages.values():
        for chunk, container in (as_mapping(root) or {}).items():
            if is_chunk(chunk) and as_mapping(container) is not None:
                yield from flattened(container, rank=folder).entries


def _set_old_rows(tensors: Mapping[str, _Tensor], version: float, facts: Facts) -> None:
    """Notes of every tensor of an old checkpoint whether its rows have another order."""
    for key, tensor in tensors.items():
        shape = tensor.held[0].array.shape
        tensor.old_rows = old_rows(param_of(key), shape[0] if shape else 0, version, facts)


def _optimizer(
    catalog: Catalog,
    model: _Model,
    facts: Facts,
    rules: Rules,
    *,
    store: ReadStore | None,
    optim: str,
    dropped: list[str],
) -> RankStates | None:
    """The optimizer, if there is one and it is to be carried."""
    kind = catalog.attrs.get(OPTIMIZER)
    if kind is None and any(file.root.get(OPTIMIZER) is not None for file in model.files.values()):
        kind = "in model_optim_rng.pt"
    if kind is None:
        return None
    if optim != "carry":
        refuse_or_drop_optimizer(str(kind), optim=optim, dropped=dropped)
        return None
    return read_states(catalog, tuple(model.files.values()), facts, rules, store=store)


def _states(found: Iterable[ParamState], model: _Model, facts: Facts) -> dict[str, _Tensor]:
    """Every state of every parameter of the whole model, as the ranks hold it."""
    made: dict[str, _Tensor] = {}
    for state in found:
        chunk = state.param.chunk
        for _, whole_name, array in chunk.arrays(state.param.name, state.array):
            name = whole_name if whole_name in model.tensors else _twin(whole_name, chunk, facts)
            key = state_key(state.state, name)
            tensor = made.get(key)
            if tensor is None:
                tensor = made[key] = _Tensor(model.tensors[name].rule)
            tensor.held.append(_Held(chunk.rank, chunk.folder, array))
    return made


def _twin(name: str, chunk: Chunk, facts: Facts) -> str:
    """The tensor that one with shared embeddings is a copy of."""
    tied = chunk.rules.rule_of(name).tied
    assert tied is not None and facts.is_tied, "every tensor of a rank was merged"
    return tied


def _merged(catalog: Catalog, ranks: Mapping[Coords, tuple[str, object]], facts: Facts, rules: Rules) -> _Model:
    """All chunks under global names, each name with its place in the whole model."""
    topology = facts.topology
    stages = facts.stages(topology.pp, topology.vpp)
    files = {topology.rank_at(coords): found for coords, found in ranks.items()}
    _check_ranks(files, topology)
    model = _Model()
    for vp_rank in range(topology.vpp):
        heads: dict[int, tuple[Chunk, list[str], dict[str, tuple[int, int]]]] = {}
        for rank, (folder, root) in files.items():
            flat = flattened(chunk_of(root, vp_rank, vpp=topology.vpp, rank=folder), rank=folder)
            model.nesting |= flat.nesting
            entries, local = flat.entries, list(flat.entries)
            where = (vp_rank, rank.pp)
            chunk = Chunk(folder, rank, where, stages, facts, rules)
            if rank.pp not in heads:
                heads[rank.pp] = (chunk, local, chunk.places(local))
                _check_layers(local, stages, where, rules, rank=folder)
            head, names, places = heads[rank.pp]
            chunk = replace(chunk, known=head.known)
            if local != names:
                _check_names(local, names, rank=folder, other=head.folder)
                places = chunk.places(local)
            params = [
                Param(chunk, name, _array(catalog, leaf))
                for name, leaf in entries.items()
                if isinstance(leaf, TensorLeaf)
            ]
            known = model.files.get(rank)
            held = (*(() if known is None else known.params), *params)
            model.files[rank] = RankFile(rank, folder, as_mapping(root) or {}, held)
            for name, leaf in entries.items():
                _add(model, catalog, chunk, name, leaf, place=places[name])
            _add_versions(model, chunk, flat.versions)
    if model.expert_names == "grouped":
        _add_expert_states(model, rules)
    if facts.kind.is_legacy and facts.is_tied:
        _add_head(model, facts)
    return model


def _add_head(model: _Model, facts: Facts) -> None:
    """Notes what the dict of the embedding's copy looks like, which a single pipeline stage does not have."""
    head, embedding = (name.rpartition(".")[0] for name in (facts.kind.head, facts.kind.embedding))
    model.nesting.setdefault(head, model.nesting.get(embedding, True))
    if embedding in model.versions and head not in model.versions:
        model.versions[head] = model.versions[embedding]
        model.module_order[head] = max(model.module_order.values())


def _check_ranks(files: Iterable[Rank], topology: Topology) -> None:
    """Every shard of what is cut over TP is in some file.

    Raises:
        MissingShardError: older Megatron left out ranks whose experts another rank holds as well.
    """
    missing = sorted(set(range(topology.tp)) - {rank.tp for rank in files})
    if missing:
        raise MissingShardError(
            f"the shards of TP ranks {listed(missing)} are in no file: before core 0.19, Megatron did not save every "
            f"rank of {topology}",
            hint="save the model again with a newer Megatron-LM, or as torch_dist",
        )


def _add(model: _Model, catalog: Catalog, chunk: Chunk, name: str, leaf: object, *, place: tuple[int, int]) -> None:
    """Puts one entry of a rank's state dict where it belongs; ``place`` is that of ``Chunk.places``."""
    expert = chunk.rules.expert_of(name)
    if expert is not None and expert.names != model.expert_names:
        if model.expert_names is not None:
            raise CorruptError(f"experts are both {model.expert_names} and {expert.names}", key=name, rank=chunk.folder)
        model.expert_names = expert.names
    if not isinstance(leaf, TensorLeaf):
        _add_state(model, chunk, name, leaf, place=place)
        return
    for number, whole, array in chunk.arrays(name, _array(catalog, leaf)):
        tensor = model.tensors.get(whole)
        rule = tensor.rule if tensor is not None else _rule_of(whole, catalog, leaf.key, chunk)
        if rule.tied is not None and chunk.facts.is_tied:
            tensor = model.tensors.get(rule.tied)
            if tensor is None:
                raise MissingShardError(
                    f"{name} is a copy of it, but it is not there", key=rule.tied, rank=chunk.folder
                )
        if tensor is None:
            tensor = model.tensors[whole] = _Tensor(rule)
            model.order[whole] = (*chunk.where, place[0], number, place[1])
        tensor.held.append(_Held(chunk.rank, chunk.folder, array))


def _array(catalog: Catalog, leaf: TensorLeaf) -> StoredArray:
    """The array of a rank's tensor."""
    known = catalog.attrs.get("arrays")
    if isinstance(known, Mapping) and leaf.key in known:
        found = known[leaf.key]
        assert isinstance(found, StoredArray)
        return found
    array = catalog.fragments(leaf.key)[0].array
    assert array is not None
    return array


def _add_state(model: _Model, chunk: Chunk, name: str, leaf: object, *, place: tuple[int, int]) -> None:
    """Puts an entry that is no tensor where it belongs."""
    rule = chunk.rules.rule_of(name)
    if rule.kind != "opaque":
        raise UnsupportedError(
            f"this entry is a {_class_of(leaf)}, not a plain tensor",
            key=name,
            rank=chunk.folder,
            hint="save the model once without quantized or otherwise special parameters",
        )
    is_packed = chunk.rules.is_packed_state(name)
    for number, whole in [(0, chunk.layer_name(name))] if is_packed else chunk.global_names(name):
        known = model.extra_states.setdefault(whole, [leaf])
        if not same(known[0], leaf):
            known.append(leaf)
        model.order.setdefault(whole, (*chunk.where, place[0], number, place[1]))


def _class_of(leaf: object) -> str:
    """What a pickle calls something: a tensor's subclass, else the function that makes it."""
    if not isinstance(leaf, Inert):
        return type(leaf).__name__
    classes = [str(part) for part in leaf.args if isinstance(part, Global)]
    return classes[-1] if classes else str(leaf.fn)


def _add_expert_states(model: _Model, rules: Rules) -> None:
    """Gives legacy grouped experts, which have no extra states, the empty ones that the other modules have."""
    if not any(values[0] is None for values in model.extra_states.values()):
        return
    for name in model.tensors:
        expert = rules.expert_of(name)
        if expert is not None:
            state = f"{name.rpartition('.')[0]}.{EXTRA_STATE}"
            model.extra_states[state] = [None]
            model.order[state] = (*model.order[name], 1)


def _add_versions(model: _Model, chunk: Chunk, versions: Mapping[str, object]) -> None:
    """Puts what torch notes about the modules of a rank where it belongs."""
    places = chunk.places([module + "." for module in versions])
    for module, version in versions.items():
        for number, whole in chunk.global_names(module + "."):
            name, place = whole[:-1], places[module + "."]
            model.versions.setdefault(name, version)
            model.module_order.setdefault(name, (*chunk.where, place[0], number, place[1]))


def _rule_of(name: str, catalog: Catalog, key: str, chunk: Chunk) -> Rule:
    """The rule of a tensor; an unknown one is reported with its shapes on all ranks."""
    rules, facts = chunk.rules, chunk.facts
    try:
        return rules.rule_of(name)
    except UnknownTensorError:
        path = key.partition(":")[2]
        shapes = [meta.shape for other, meta in catalog.tensors.items() if other.partition(":")[2] == path]
        return rules.rule_of(name, shapes=shapes, hidden_size=facts.hidden_size, tp=facts.topology.tp)


def _check_layers(names: Sequence[str], stages: Stages, where: tuple[int, int], rules: Rules, *, rank: str) -> None:
    """A chunk holds exactly the layers that its stage should."""
    held: dict[str, set[int]] = {stack: set() for stack in rules.stacks}
    for name in names:
        found = rules.layer_of(name)
        if found is not None:
            held[found.stack].add(found.number)
    for stack, layers in held.items():
        count = stages.count(stack, *where)
        missing = sorted(set(range(count)) - layers)
        if missing:
            raise MissingShardError(f"layers {listed(missing)} of this stage's {count} are not there", rank=rank)
        extra = sorted(layers - set(range(count)))
        if extra:
            raise CorruptError(f"layers {listed(extra)} are beyond the {count} that this stage should hold", rank=rank)


def _check_names(names: Sequence[str], others: Sequence[str], *, rank: str, other: str) -> None:
    """Ranks of one stage hold the same names: experts are numbered anew in each."""
    missing, extra = sorted(set(others) - set(names)), sorted(set(names) - set(others))
    if missing:
        raise MissingShardError(f"{listed(missing)} is in {other}, but not here", rank=rank)
    if extra:
        raise MissingShardError(f"{listed(extra)} is in {rank}, but not here", rank=other)


def _settle_states(model: _Model, store: ReadStore | None, dropped: list[str]) -> None:
    """Empties the extra states that cannot be kept (``core.layout_extra``)."""
    tensors = {name: tensor for name, tensor in model.tensors.items() if tensor.rule.kind == "opaque"}
    for name in (*tensors, *(name for name in model.extra_states if name not in tensors)):
        arrays = [held.array for held in tensors[name].held] if name in tensors else []
        why = disagreement(model.extra_states.get(name, ()), arrays, store)
        if why is not None and not name.endswith(EXTRA_STATE):
            raise UnsupportedError(f"what its rule calls opaque cannot be resharded: {why.partition(';')[0]}", key=name)
        if why is not None:
            dropped.append(f"{name} ({why})")
            model.tensors.pop(name, None)
            model.extra_states[name] = [None]


def _settle_rules(model: _Model, facts: Facts) -> bool:
    """Cuts what its rule replicates where every rank has only its share of the rows; returns whether there is such.

    One rank alone does not show it; there it is the local implementation that cuts.
    """
    is_cut = facts.is_mla and facts.is_local and facts.topology.tp == 1
    for tensor in model.tensors.values():
        wanted = extent_of(tensor.rule, facts) if tensor.rule.cut_axis is None else None
        rows = next(iter(tensor.held[0].array.shape), 0)
        if wanted is not None and rows != wanted and rows * facts.topology.tp == wanted:
            tensor.rule = tensor.rule.as_cut()
            is_cut = True
    return is_cut


def _checked_shape(name: str, tensor: _Tensor, topology: Topology, *, like: _Tensor | None = None) -> Shape:
    """The global shape; every rank's must agree, and be that of ``like``."""
    head = tensor.held[0]
    axis = tensor.rule.cut_axis
    shape = head.array.shape if like is None else like.held[0].array.shape
    for held in tensor.held:
        if held.array.shape != shape or held.array.dtype != head.array.dtype:
            raise CorruptError(
                f"{held.array.dtype} of shape {held.array.shape} here, {head.array.dtype} of shape "
                f"{head.array.shape} in {head.folder}",
                key=name,
                rank=held.folder,
            )
    if axis is not None and axis >= len(head.array.shape):
        raise CorruptError(f"the tensor has {len(head.array.shape)} axes, but its rule cuts axis {axis}", key=name)
    return global_shape(head.array.shape, axis, topology.size_of(tensor.rule.group))


def _vocab_rows(facts: Facts, *, given: int | None, keep_padded: bool, model: _Model, notes: list[str]) -> int | None:
    """Rows of the true vocabulary; None where nothing says."""
    stored = [
        tensor.held[0].array.shape[0] * facts.topology.tp
        for tensor in model.tensors.values()
        if tensor.rule.kind == "vocab" and tensor.held[0].array.shape
    ]
    return vocab_rows(facts, given=given, keep_padded=keep_padded, stored=stored, notes=notes)


def _fragments(
    key: str, tensor: _Tensor, shape: Shape, facts: Facts, known: dict[object, list[Piece]]
) -> Iterator[Fragment]:
    """One fragment for every piece that a rank holds; ``known`` remembers how tensors of one kind are cut."""
    rule = tensor.rule
    for held in tensor.held:
        number = 0 if rule.cut_axis is None else held.rank.within(rule.group)
        kind = (id(rule), shape, held.array.shape, number)
        pieces = known.get(kind)
        if pieces is None:
            pieces = known[kind] = _pieces(key, rule, shape, held, facts)
        for piece in pieces:
            fragment = Fragment(key, piece.box, held.array, piece.at)
            if tensor.old_rows is None:
                yield fragment
            else:
                yield from tensor.old_rows.fragments(fragment)


def _pieces(key: str, rule: Rule, shape: Shape, held: _Held, facts: Facts) -> list[Piece]:
    """The pieces of a tensor that a rank's array holds, without padding."""
    axis = rule.cut_axis
    if axis is None:
        return replicated(shape)
    n = facts.topology.size_of(rule.group)
    padded = global_shape(held.array.shape, axis, n)
    parts = parts_of(rule, padded[axis], facts, key=key)
    pieces = split(padded, axis, parts=parts, rank=held.rank.within(rule.group), n=n)
    return [kept for piece in pieces if (kept := trimmed(piece, axis, shape[axis])) is not None]
