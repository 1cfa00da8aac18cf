"""From rank-local names and shapes to global ones: the rank files of a Megatron checkpoint as one model.

The result is the *global per-layer form*, which ``core.megatron.reshard.to_ranks`` and
``core.megatron.reshard.to_torch_dist`` take. Keys are names as rank files have them, without ``model.``; layers and
experts are numbered over the whole model, shapes are those of the whole tensors, and there is one fragment for every
piece that a rank holds. What several ranks hold gives several fragments with one box; the engine compares them::

    decoder.layers.3.input_layernorm.weight                          or self_attention.linear_qkv.layer_norm_weight,
                                                                     whichever the model's rank files have
    decoder.layers.3.mlp.router.weight
    decoder.layers.3.mlp.shared_experts.linear_fc1.weight            gated: all gate rows, then all up rows
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight  always this form, whatever rank files say

An optimizer's states stand beside them, see ``core.catalog.optimizer_keys``.

The result has the fields ``args`` (``core.megatron.model.args.facts_of`` says which arguments matter), ``iteration``,
``common`` (the other top-level entries, ``args`` among them; ``core.megatron.extras.common_state``), ``optimizer``,
``notes`` and ``dropped``, and the facets ``MegatronModel`` and ``Topology`` (the source's).

Objects: extra states per layer, and random states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from core.arrays.box import Shape
from core.arrays.sharding import ShardPiece, global_shape, replicated_pieces, split_axis, trim_piece
from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta, metas_of, whole_fragment
from core.catalog.facets import MegatronModel, RankFacts
from core.catalog.optimizer_keys import STEP, param_of, state_key
from core.catalog.stored import Coords, StoredArray
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.common_state import (
    EXTRA_STATE,
    OLDEST,
    OPTIMIZER,
    beside,
    check_version,
    is_chunk,
    is_ordered,
    iteration_of,
    refuse_or_drop_optimizer,
)
from core.megatron.extras.extra_states import disagreement
from core.megatron.extras.nested_dicts import flattened
from core.megatron.model.args import facts_of
from core.megatron.model.checks import check_complete, check_predictions, check_shape, extent_of, fc2_of, gate_notes
from core.megatron.model.facts import Facts
from core.megatron.model.parts import check_parts, parts_of, with_sizes
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import cut_vocab, vocab_rows
from core.megatron.optimizer.rank_state import ParamState, RankStates
from core.megatron.placement.chunk import Chunk
from core.megatron.placement.qkv_order import CURRENT, old_rows
from core.megatron.reshard.rank_model import Held, HeldTensor, RankModel, merged
from core.megatron.reshard.rank_optimizer import read_states
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import TensorLeaf, as_mapping, walk


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
    """The global form of a rank catalog; see ``core.megatron.reshard.reshard.unshard``."""
    rank_facts = catalog.facet(RankFacts)
    if rank_facts is not None and rank_facts.is_single_rank:
        raise UnsupportedError(
            "this is one rank of a checkpoint; the others are needed as well",
            hint="point at the directory that holds the rank directories",
        )
    ranks = ranks_of(catalog)
    facts = facts_of(catalog.args, names=rules.model_of(local_names(ranks)))
    check_predictions(facts, facts.topology)
    notes: list[str] = []
    dropped: list[str] = []
    model = merged(catalog, ranks, facts, rules)
    check_complete(model.tensors, facts, rules)
    others = beside(ranks, facts.topology, dropped)
    common, objects = others.common, others.objects
    version = check_version(common, has_old_names=facts.kind.is_legacy)
    _settle_states(model, store, dropped)
    is_down_proj_cut = settle_rules(model, facts)
    found = _optimizer(catalog, model, facts, rules, store=store, optim=optim, dropped=dropped)
    states: dict[str, HeldTensor] = {}
    copies: dict[str, Sequence[StoredArray]] = {}
    if found is not None:
        states = _states(found.states, model, facts)
        copies = {**found.beside, **({STEP: found.steps} if found.steps else {})}
        notes += found.notes
        dropped += found.dropped
    n_rows = _vocab_rows(facts, given=vocab_size, keep_padded=keep_padded_vocab, model=model, notes=notes)
    stored = {name: checked_shape(name, tensor, facts.topology) for name, tensor in model.tensors.items()}
    said, facts = facts, with_sizes(facts, stored, rules)
    notes += gate_notes(said, facts)
    check_shapes(model, stored, facts)
    order = sorted(model.order, key=model.order.__getitem__)
    shapes = {name: stored[name] for name in order if name in stored}
    for name, shape in shapes.items():
        if model.tensors[name].rule.kind == "vocab":
            shapes[name] = cut_vocab(shape, name, facts, n_rows=n_rows, target_tp=target_tp, notes=notes)
    for key, state in states.items():
        checked_shape(key, state, facts.topology, like=model.tensors[param_of(key)])
        shapes[key] = shapes[param_of(key)]
    tensors = {**model.tensors, **states}
    if version < OLDEST:
        _set_old_rows(tensors, version, facts)
        common["checkpoint_version"] = CURRENT
        notes.append(
            f"rows of query, key and value are now in the order of checkpoint_version {CURRENT}, not {version}"
        )

    root = as_mapping(next(iter(ranks.values()))[1]) or {}
    cut: dict[object, list[ShardPiece]] = {}

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in copies:
            return tuple(whole_fragment(key, one) for one in copies[key])
        tensor = tensors.get(key)
        if tensor is None:
            return catalog.fragments(key)
        return tuple(_fragments(key, tensor, shapes[key], facts, cut))

    first_chunk = next((value for key, value in root.items() if is_chunk(key)), None)
    modules = sorted(model.versions, key=model.module_order.__getitem__)
    megatron = MegatronModel(
        vocab_size=n_rows,
        expert_names=model.expert_names,
        is_down_proj_cut=is_down_proj_cut,
        rng_states=others.rng_states,
        order=tuple(order),
        module_versions={name: model.versions[name] for name in modules},
        is_ordered=is_ordered(first_chunk),
        nesting={name: is_dict for name, is_dict in model.nesting.items() if name},
        top_level=tuple(dict.fromkeys("model" if is_chunk(key) else key for key in root)),
    )
    objects |= {name: StoredObject(name, value=values[0]) for name, values in model.extra_states.items()}
    parts = (common, *(item.value for item in objects.values()), *others.rng_states.values())
    inside = [leaf.key for leaf in walk(parts) if isinstance(leaf, TensorLeaf)]
    return replace(
        catalog,
        tensors={name: TensorMeta(name, tensors[name].held[0].array.dtype, shapes[name]) for name in shapes},
        objects=objects,
        hidden={key: catalog.meta(key) for key in inside}
        | metas_of({key: arrays[0] for key, arrays in copies.items()}),
        fragments_of=fragments_of,
        skeleton=None,
        iteration=iteration_of(common),
        common=common,
        optimizer=None if found is None else found.optimizer,
        aliases={},
        unsupported={},
        notes=(*catalog.notes, *notes),
        dropped=tuple(dropped),
        facets={Topology: facts.topology, MegatronModel: megatron},
    )


def check_shapes(model: RankModel, stored: Mapping[str, Shape], facts: Facts) -> None:
    """The tensors have the shapes that the arguments and their rules ask for.

    Args:
        stored: name → global shape, padding rows included.
    """
    for name, shape in stored.items():
        rule = model.tensors[name].rule
        check_shape(name, shape, stored.get(fc2_of(name)), rule, facts)
        check_parts(rule, shape, facts, key=name)


def ranks_of(catalog: Catalog) -> Mapping[Coords, tuple[str, object]]:
    """Coordinates → (directory, content of its file), of a rank catalog."""
    facts = catalog.facet(RankFacts)
    assert facts is not None, "a rank catalog lists its ranks"
    return facts.ranks


def local_names(ranks: Mapping[Coords, tuple[str, object]]) -> Iterator[str]:
    """The names in all chunks of every pipeline stage, from one of its ranks."""
    stages = {dict(coords).get("pp"): found for coords, found in ranks.items()}
    for folder, root in stages.values():
        for chunk, container in (as_mapping(root) or {}).items():
            if is_chunk(chunk) and as_mapping(container) is not None:
                yield from flattened(container, rank=folder).entries


def _set_old_rows(tensors: Mapping[str, HeldTensor], version: float, facts: Facts) -> None:
    """Notes of every tensor of an old checkpoint whether its rows have another order."""
    for key, tensor in tensors.items():
        shape = tensor.held[0].array.shape
        tensor.old_rows = old_rows(param_of(key), shape[0] if shape else 0, version, facts)


def _optimizer(
    catalog: Catalog,
    model: RankModel,
    facts: Facts,
    rules: Rules,
    *,
    store: ReadStore | None,
    optim: str,
    dropped: list[str],
) -> RankStates | None:
    """The optimizer, if there is one and it is to be carried."""
    rank_facts = catalog.facet(RankFacts)
    kind = None if rank_facts is None else rank_facts.optimizer_kind
    if kind is None and any(file.root.get(OPTIMIZER) is not None for file in model.files.values()):
        kind = "in model_optim_rng.pt"
    if kind is None:
        return None
    if optim != "carry":
        refuse_or_drop_optimizer(str(kind), optim=optim, dropped=dropped)
        return None
    return read_states(catalog, tuple(model.files.values()), facts, rules, store=store)


def _states(found: Iterable[ParamState], model: RankModel, facts: Facts) -> dict[str, HeldTensor]:
    """Every state of every parameter of the whole model, as the ranks hold it."""
    made: dict[str, HeldTensor] = {}
    for state in found:
        chunk = state.param.chunk
        for _, whole_name, array in chunk.arrays(state.param.name, state.array):
            name = whole_name if whole_name in model.tensors else _twin(whole_name, chunk, facts)
            key = state_key(state.state, name)
            tensor = made.get(key)
            if tensor is None:
                tensor = made[key] = HeldTensor(model.tensors[name].rule)
            tensor.held.append(Held(chunk.rank, chunk.folder, array))
    return made


def _twin(name: str, chunk: Chunk, facts: Facts) -> str:
    """The tensor that one with shared embeddings is a copy of."""
    tied = chunk.rules.rule_of(name).tied
    assert tied is not None and facts.is_tied, "every tensor of a rank was merged"
    return tied


def _settle_states(model: RankModel, store: ReadStore | None, dropped: list[str]) -> None:
    """Empties the extra states that cannot be kept (``core.megatron.extras.extra_states``)."""
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


def settle_rules(model: RankModel, facts: Facts) -> bool:
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


def checked_shape(name: str, tensor: HeldTensor, topology: Topology, *, like: HeldTensor | None = None) -> Shape:
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


def _vocab_rows(
    facts: Facts, *, given: int | None, keep_padded: bool, model: RankModel, notes: list[str]
) -> int | None:
    """Rows of the true vocabulary; None where nothing says."""
    stored = [
        tensor.held[0].array.shape[0] * facts.topology.tp
        for tensor in model.tensors.values()
        if tensor.rule.kind == "vocab" and tensor.held[0].array.shape
    ]
    return vocab_rows(facts, given=given, keep_padded=keep_padded, stored=stored, notes=notes)


def _fragments(
    key: str, tensor: HeldTensor, shape: Shape, facts: Facts, known: dict[object, list[ShardPiece]]
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


def _pieces(key: str, rule: Rule, shape: Shape, held: Held, facts: Facts) -> list[ShardPiece]:
    """The pieces of a tensor that a rank's array holds, without padding."""
    axis = rule.cut_axis
    if axis is None:
        return replicated_pieces(shape)
    n = facts.topology.size_of(rule.group)
    padded = global_shape(held.array.shape, axis, n)
    parts = parts_of(rule, padded[axis], facts, key=key)
    one = replicated_pieces(padded)  # what one rank holds whole has its parts one after the other on both sides
    pieces = one if n == 1 else split_axis(padded, axis, parts=parts, rank=held.rank.within(rule.group), n=n)
    return [kept for piece in pieces if (kept := trim_piece(piece, axis, shape[axis])) is not None]
