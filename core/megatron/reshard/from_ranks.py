"""From rank-local names and shapes to global ones: the rank files of a Megatron checkpoint as one
model.

The result is the *global per-layer form*, which ``core.megatron.reshard.to_ranks`` and
``core.megatron.reshard.to_torch_dist`` take. Keys are names as rank files have them, without
``model.``; layers and experts are numbered over the whole model, shapes are those of the whole
tensors, and there is one fragment for every
piece that a rank holds. What several ranks hold gives several fragments with one box; the engine compares them::

    decoder.layers.3.input_layernorm.weight                          or self_attention.linear_qkv.layer_norm_weight,
                                                                     whichever the model's rank
                                                                     files have
    decoder.layers.3.mlp.router.weight
    decoder.layers.3.mlp.shared_experts.linear_fc1.weight            gated: all gate rows, then all up rows
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight  always this form, whatever rank
    files say

An optimizer's states are tensors as well (``core.catalog.optimizer_keys``).

The result has the fields ``args`` (``core.megatron.model.args.facts_of`` says which arguments
matter), ``iteration``, ``common`` (the other top-level entries, ``args`` among them;
``core.megatron.extras.common_state``), ``optimizer``, ``notes`` and ``dropped``, and the facets
``MegatronModel`` and ``Topology`` (the source's).

Objects: extra states per layer, and random states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.arrays.box import Shape
from core.arrays.sharding import ShardPiece, global_shape, replicated_pieces, split_axis, trim_piece
from core.catalog.catalog import (
    Catalog,
    Fragment,
    StoredObject,
    TensorMeta,
    metas_of,
    whole_fragment,
)
from core.catalog.facets import MegatronModel, RankFacts
from core.catalog.optimizer_keys import STEP, param_of, state_key
from core.catalog.stored import Coords, StoredArray
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.common_state import (
    EXTRA_STATE,
    OLDEST,
    OPTIMIZER,
    check_version,
    is_chunk,
    is_ordered,
    iteration_of,
    note_dropped_optimizer,
    read_rank_extras,
)
from core.megatron.extras.extra_states import disagreement
from core.megatron.extras.nested_dicts import flattened
from core.megatron.model.args import facts_of
from core.megatron.model.checks import (
    check_complete,
    check_predictions,
    check_shape,
    extent_of,
    fc2_of,
    gate_notes,
)
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import check_parts, parts_of, with_sizes
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import cut_vocab, find_true_rows
from core.megatron.optimizer.rank_state import RankStates
from core.megatron.placement.qkv_order import CURRENT, old_rows
from core.megatron.reshard.rank_model import RankModel, RankPart, RankTensor, merge_ranks
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
    """Return the global form of a rank catalog (``core.megatron.reshard.reshard.unshard`` explains
    the arguments).
    """
    _check_all_ranks(catalog)
    ranks = ranks_of(catalog)
    facts = facts_of(catalog.args, names=rules.model_of(local_names(ranks)))
    check_predictions(facts, facts.topology)
    notes: list[str] = list(catalog.notes)

    # Put the tensors of all ranks under global names.
    model = merge_ranks(catalog, ranks, facts, rules)
    check_complete(model.tensors, facts, rules)
    extras = read_rank_extras(ranks, facts.topology)
    version = check_version(extras.common, has_old_names=facts.kind.is_legacy)
    dropped = [*extras.dropped, *_empty_lost_states(model, store)]
    is_down_proj_cut = settle_rules(model, facts)

    # Find the optimizer's states by their parameters.
    optimizer: RankStates | None = None
    states: dict[str, RankTensor] = {}
    copies: dict[str, Sequence[StoredArray]] = {}
    kind = _optimizer_kind(catalog, model)
    if kind is not None and optim == "carry":
        optimizer = read_states(catalog, tuple(model.files.values()), facts, rules, store=store)
        states = _state_tensors(optimizer, model, facts)
        copies = {**optimizer.beside, **({STEP: optimizer.steps} if optimizer.steps else {})}
        notes += optimizer.notes
        dropped += optimizer.dropped
    elif kind is not None:
        dropped.append(note_dropped_optimizer(kind, optim=optim))

    # Join the shapes of the ranks, and check them against the arguments.
    stored_rows = _vocab_rows(model, facts)
    true_rows = find_true_rows(
        facts, given=vocab_size, keep_padded=keep_padded_vocab, stored=stored_rows
    )
    stored = {
        name: global_shape_of(name, tensor, facts.topology)
        for name, tensor in model.tensors.items()
    }
    facts_of_args, facts = facts, with_sizes(facts, stored, rules)
    check_shapes(model, stored, facts)
    order = sorted(model.order, key=model.order.__getitem__)
    shapes = {name: stored[name] for name in order if name in stored}
    cut = cut_vocab(
        _vocab_shapes(model, shapes), facts, n_rows=true_rows.n_rows, target_tp=target_tp
    )
    shapes |= cut.shapes
    notes += [*true_rows.notes, *gate_notes(facts_of_args, facts), *cut.notes]
    for key, state in states.items():
        global_shape_of(key, state, facts.topology, like=model.tensors[param_of(key)])
        shapes[key] = shapes[param_of(key)]

    # Rows that an old checkpoint has in another order are put in order by their fragments.
    tensors = {**model.tensors, **states}
    common = extras.common
    if version < OLDEST:
        _set_old_rows(tensors, version, facts)
        common = {**common, "checkpoint_version": CURRENT}
        notes.append(
            f"rows of query, key and value are now in the order of checkpoint_version {CURRENT}, not {version}"
        )

    states_without_tensors = {
        name: StoredObject(name, value=values[0]) for name, values in model.extra_states.items()
    }
    objects = extras.objects | states_without_tensors
    parts = (common, *(item.value for item in objects.values()), *extras.rng_states.values())
    hidden = {
        leaf.key: catalog.meta(leaf.key) for leaf in walk(parts) if isinstance(leaf, TensorLeaf)
    }
    hidden |= metas_of({key: arrays[0] for key, arrays in copies.items()})
    megatron = replace(
        _described_files(model, ranks),
        vocab_size=true_rows.n_rows,
        is_down_proj_cut=is_down_proj_cut,
        rng_states=extras.rng_states,
        order=tuple(order),
    )
    return replace(
        catalog,
        tensors={
            name: TensorMeta(name, tensors[name].parts[0].array.dtype, shapes[name])
            for name in shapes
        },
        objects=objects,
        hidden=hidden,
        fragments_of=_RankFragments(catalog, tensors, shapes, copies, facts).fragments_of,
        skeleton=None,
        iteration=iteration_of(common),
        common=common,
        optimizer=None if optimizer is None else optimizer.optimizer,
        aliases={},
        unsupported={},
        notes=tuple(notes),
        dropped=tuple(dropped),
        facets={Topology: facts.topology, MegatronModel: megatron},
    )


def _check_all_ranks(catalog: Catalog) -> None:
    """Raise if the catalog is one rank's, not a checkpoint's."""
    rank_facts = catalog.facet(RankFacts)
    if rank_facts is not None and rank_facts.is_single_rank:
        raise UnsupportedError(
            "this is one rank of a checkpoint; the others are needed as well",
            hint="point at the directory that holds the rank directories",
        )


def check_shapes(model: RankModel, stored: Mapping[str, Shape], facts: ModelFacts) -> None:
    """Raise unless the tensors have the shapes that the arguments and their rules ask for.

    Args:
        stored: name → global shape, padding rows included.
    """
    for name, shape in stored.items():
        rule = model.tensors[name].rule
        check_shape(name, shape, stored.get(fc2_of(name)), rule, facts)
        check_parts(rule, shape, facts, key=name)


def ranks_of(catalog: Catalog) -> Mapping[Coords, tuple[str, object]]:
    """Return the ranks of a rank catalog: coordinates → (directory, content of its file)."""
    facts = catalog.facet(RankFacts)
    assert facts is not None, "a rank catalog lists its ranks"
    return facts.ranks


def local_names(ranks: Mapping[Coords, tuple[str, object]]) -> Iterator[str]:
    """Yield the names in all chunks of every pipeline stage, taken from one rank of each."""
    stages = {dict(coords).get("pp"): file for coords, file in ranks.items()}
    for folder, root in stages.values():
        for chunk, container in (as_mapping(root) or {}).items():
            if is_chunk(chunk) and as_mapping(container) is not None:
                yield from flattened(container, rank=folder).entries


def _set_old_rows(tensors: Mapping[str, RankTensor], version: float, facts: ModelFacts) -> None:
    """Note on every tensor of an old checkpoint whether its rows have another order."""
    for key, tensor in tensors.items():
        shape = tensor.parts[0].array.shape
        tensor.old_rows = old_rows(param_of(key), shape[0] if shape else 0, version, facts)


def _optimizer_kind(catalog: Catalog, model: RankModel) -> str | None:
    """Return the kind of the optimizer in the files, in words for people; None if they have
    none.
    """
    rank_facts = catalog.facet(RankFacts)
    if rank_facts is not None and rank_facts.optimizer_kind is not None:
        return str(rank_facts.optimizer_kind)
    is_in_files = any(file.root.get(OPTIMIZER) is not None for file in model.files.values())
    return "in model_optim_rng.pt" if is_in_files else None


def _state_tensors(
    optimizer: RankStates, model: RankModel, facts: ModelFacts
) -> dict[str, RankTensor]:
    """Return every state of every parameter of the model, as the ranks hold it."""
    tensors: dict[str, RankTensor] = {}
    for state in optimizer.states:
        chunk = state.param.chunk
        for _, global_name, array in chunk.arrays(state.param.name, state.array):
            name = global_name
            if (
                name not in model.tensors
            ):  # a copy of shared embeddings, which is no tensor of its own
                tied = chunk.rules.rule_of(name).tied
                assert tied is not None and facts.is_tied, "every tensor of a rank was merged"
                name = tied
            key = state_key(state.state, name)
            tensor = tensors.get(key)
            if tensor is None:
                tensor = tensors[key] = RankTensor(model.tensors[name].rule)
            tensor.parts.append(RankPart(chunk.rank, chunk.folder, array))
    return tensors


def _empty_lost_states(model: RankModel, store: ReadStore | None) -> list[str]:
    """Empty the extra states that cannot be kept (``core.megatron.extras.extra_states``).

    Returns:
        A note for each of them.
    """
    dropped: list[str] = []
    tensors = {
        name: tensor for name, tensor in model.tensors.items() if tensor.rule.kind == "opaque"
    }
    for name in (*tensors, *(name for name in model.extra_states if name not in tensors)):
        arrays = [part.array for part in tensors[name].parts] if name in tensors else []
        reason = disagreement(model.extra_states.get(name, ()), arrays, store)
        if reason is None:
            continue
        if not name.endswith(EXTRA_STATE):
            problem = f"a tensor that its rule calls opaque cannot be resharded: {reason.partition(';')[0]}"
            raise UnsupportedError(problem, key=name)
        dropped.append(f"{name} ({reason})")
        model.tensors.pop(name, None)
        model.extra_states[name] = [None]
    return dropped


def settle_rules(model: RankModel, facts: ModelFacts) -> bool:
    """Cut what its rule replicates where every rank has only its share of the rows.

    A single rank does not show it; then it is assumed for latent attention in the local
    implementation, which cuts.

    Returns:
        Whether some tensor is cut so.
    """
    is_cut = facts.is_mla and facts.is_local and facts.topology.tp == 1
    for tensor in model.tensors.values():
        extent = extent_of(tensor.rule, facts) if tensor.rule.cut_axis is None else None
        rows = next(iter(tensor.parts[0].array.shape), 0)
        if extent is not None and rows != extent and rows * facts.topology.tp == extent:
            tensor.rule = tensor.rule.as_cut()
            is_cut = True
    return is_cut


def global_shape_of(
    name: str, tensor: RankTensor, topology: Topology, *, like: RankTensor | None = None
) -> Shape:
    """Return the global shape of a tensor, checking that the ranks agree.

    Args:
        like: the parameter, where the tensor is a state of it: shapes must be the parameter's.

    Raises:
        CorruptError: ranks differ in dtype or shape, or the tensor lacks the axis that its rule
            cuts.
    """
    first = tensor.parts[0]
    axis = tensor.rule.cut_axis
    shape = first.array.shape if like is None else like.parts[0].array.shape
    for part in tensor.parts:
        if part.array.shape != shape or part.array.dtype != first.array.dtype:
            raise CorruptError(
                f"{part.array.dtype} of shape {part.array.shape} here, {first.array.dtype} of shape "
                f"{first.array.shape} in {first.folder}",
                key=name,
                rank=part.folder,
            )
    if axis is not None and axis >= len(first.array.shape):
        raise CorruptError(
            f"the tensor has {len(first.array.shape)} axes, but its rule cuts axis {axis}", key=name
        )
    return global_shape(first.array.shape, axis, topology.size_of(tensor.rule.group))


def _vocab_shapes(model: RankModel, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {
        name: shape for name, shape in shapes.items() if model.tensors[name].rule.kind == "vocab"
    }


def _vocab_rows(model: RankModel, facts: ModelFacts) -> list[int]:
    """Return the rows, padding included, of every tensor with a row for each token."""
    return [
        tensor.parts[0].array.shape[0] * facts.topology.tp
        for tensor in model.tensors.values()
        if tensor.rule.kind == "vocab" and tensor.parts[0].array.shape
    ]


def _described_files(model: RankModel, ranks: Mapping[Coords, tuple[str, object]]) -> MegatronModel:
    """Return what the files look like, so that rank files can be written in the same way."""
    root = as_mapping(next(iter(ranks.values()))[1]) or {}
    first_chunk = next((value for key, value in root.items() if is_chunk(key)), None)
    modules = sorted(model.versions, key=model.module_order.__getitem__)
    return MegatronModel(
        expert_names=model.expert_names,
        module_versions={name: model.versions[name] for name in modules},
        is_ordered=is_ordered(first_chunk),
        nesting={name: is_dict for name, is_dict in model.nesting.items() if name},
        top_level=tuple(dict.fromkeys("model" if is_chunk(key) else key for key in root)),
    )


@dataclass(frozen=True, slots=True)
class _RankFragments:
    """Finds the fragments of global tensors in the arrays of the ranks.

    Args:
        catalog: the rank catalog.
        tensors: global key → what the ranks hold of the tensor.
        shapes: global key → shape, without padding rows that are cut.
        copies: key of a hidden tensor → its equal arrays.
        facts: facts about the source.
    """

    catalog: Catalog
    tensors: Mapping[str, RankTensor]
    shapes: Mapping[str, Shape]
    copies: Mapping[str, Sequence[StoredArray]]
    facts: ModelFacts
    _pieces: dict[object, list[ShardPiece]] = field(default_factory=dict, init=False)
    """Pieces of tensors that were asked for before, by rule and shape: such tensors are cut
    alike.
    """

    def fragments_of(self, key: str) -> Sequence[Fragment]:
        """Return one fragment for every piece that a rank holds of a tensor."""
        if key in self.copies:
            return tuple(whole_fragment(key, array) for array in self.copies[key])
        tensor = self.tensors.get(key)
        if tensor is None:
            return self.catalog.fragments(key)
        return tuple(self._fragments(key, tensor, self.shapes[key]))

    def _fragments(self, key: str, tensor: RankTensor, shape: Shape) -> Iterator[Fragment]:
        """Yield the fragments of a tensor, in the order of the ranks."""
        rule = tensor.rule
        for part in tensor.parts:
            number = 0 if rule.cut_axis is None else part.rank.within(rule.group)
            kind = (id(rule), shape, part.array.shape, number)
            pieces = self._pieces.get(kind)
            if pieces is None:
                pieces = self._pieces[kind] = _cut_pieces(key, rule, shape, part, self.facts)
            for piece in pieces:
                fragment = Fragment(key, piece.box, part.array, piece.at)
                if tensor.old_rows is None:
                    yield fragment
                else:
                    yield from tensor.old_rows.fragments(fragment)


def _cut_pieces(
    key: str, rule: Rule, shape: Shape, part: RankPart, facts: ModelFacts
) -> list[ShardPiece]:
    """Return the pieces of a tensor that a rank's array holds, without padding."""
    axis = rule.cut_axis
    if axis is None:
        return replicated_pieces(shape)
    n = facts.topology.size_of(rule.group)
    padded = global_shape(part.array.shape, axis, n)
    extents = parts_of(rule, padded[axis], facts, key=key)
    if n == 1:  # the consecutive parts of the axis follow each other on both sides
        pieces = replicated_pieces(padded)
    else:
        pieces = split_axis(padded, axis, parts=extents, rank=part.rank.within(rule.group), n=n)
    trimmed_pieces = (trim_piece(piece, axis, shape[axis]) for piece in pieces)
    return [piece for piece in trimmed_pieces if piece is not None]
