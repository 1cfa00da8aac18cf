"""Unshard rank files: build one model of global tensors from the files of all ranks.

The result is the *global per-layer form*, which ``core.megatron.reshard.to_ranks`` and
``core.megatron.reshard.to_torch_dist`` read. Keys are the names in rank files, without ``model.``,
but with layers and experts numbered over the complete model. Shapes are those of the global
tensors. Every shard of a rank gives one fragment or more; replicas give fragments with the same
box, which the engine compares::

    decoder.layers.3.input_layernorm.weight
        or ….3.self_attention.linear_qkv.layer_norm_weight: the name in the model's rank files
    decoder.layers.3.mlp.router.weight
    decoder.layers.3.mlp.shared_experts.linear_fc1.weight
        gated: all gate rows, then all up rows
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight
        always in this form, however the rank files name experts

The states of an optimizer are tensors as well (``core.engine.catalog.optimizer_keys``). The objects
are extra states, per layer, and random states.

The result has the fields ``args`` (``core.megatron.model.args.parse_facts`` lists the arguments
that matter), ``iteration``, ``common`` (the other top-level entries, ``args`` among them;
``core.megatron.extras.common_state``), ``optimizer``, ``notes`` and ``dropped``, and the facets
``MegatronModel`` and ``Topology`` (the source's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from core.arrays.box import Shape
from core.arrays.sharding import ShardPiece, global_shape, replicated_pieces, split_axis, trim_piece
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_each, dropped_unlisted
from core.engine.catalog.facets import MegatronModel, RankFacts
from core.engine.catalog.mapping_attributes import (
    VERSIONS,
    attributes_of,
    own_attributes,
    record_attributes,
)
from core.engine.catalog.optimizer_keys import STEP, Optimizer, param_of, state_key
from core.engine.catalog.stored import Coords, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument, whole_tensor
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.common_state import (
    EXTRA_STATE,
    OLDEST,
    OPTIMIZER,
    collect_rank_extras,
    get_checkpoint_version,
    get_iteration,
    is_chunk,
    is_ordered,
    record_dropped_optimizer,
)
from core.megatron.extras.extra_states import disagreement
from core.megatron.extras.nested_dicts import flattened, without_outer_names
from core.megatron.extras.rank_numbers import check_rank_numbers, have_numbers
from core.megatron.model.args import fields_of, is_multi_query, parse_facts, replaced
from core.megatron.model.checks import check_complete, check_shapes, gate_notes, sizes_for
from core.megatron.model.cut import check_head_gates
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import check_parts, measure_parts, with_sizes
from core.megatron.model.pipeline_args import is_v_shaped
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import PADDING, cut_vocab, find_true_rows
from core.megatron.reshard.equal_shards import one_of_each_kind, raise_if_equal_shards
from core.megatron.reshard.rank_model import (
    RankModel,
    RankPart,
    RankTensor,
    merge_ranks,
    with_v_shape,
)
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import TensorLeaf, as_mapping, walk
from core.values import dataclass


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
    """Return the global per-layer form of a rank catalog.

    ``core.megatron.reshard.unshard.unshard`` explains the arguments and errors.
    """
    rank_facts = catalog.facet(RankFacts)
    if rank_facts is not None and rank_facts.is_single_rank:
        raise UnsupportedError(
            "this is only one rank of a checkpoint; ckpt also needs the other ranks",
            hint="pass the directory that contains the rank directories",
        )
    ranks = ranks_of(catalog)
    # In a sample, ranks whose files were not opened have the content of others.
    if rank_facts is None or not rank_facts.n_unopened:
        check_rank_numbers(ranks.values())
    check_head_gates(catalog.args, "megatron")
    facts = facts_of_ranks(catalog.args, ranks, rules)

    # Put the tensors of all ranks under global names. Lost extra states go before the rules are
    # settled and the optimizer is read, which both go through the model's tensors.
    model = merge_ranks(catalog, ranks, facts, rules)
    check_complete(model.metas(), facts, rules)
    extras = collect_rank_extras(ranks, facts.topology)
    version = get_checkpoint_version(extras.common, has_old_names=facts.kind.is_legacy)
    lost_states = _empty_lost_states(model, store)
    is_down_proj_cut = settle_rules(model, facts)
    if store is not None:
        tensors = model.tensors
        if rank_facts is not None and rank_facts.n_unopened:
            tensors = one_of_each_kind(tensors, catalog, facts.topology)
        raise_if_equal_shards(tensors, facts.topology, store)
        misplaced = None
        if not have_numbers(ranks.values()):
            from core.megatron.reshard.padding_place import find_misplaced_padding

            misplaced = find_misplaced_padding(tensors, facts, store)
        if misplaced is not None:
            raise misplaced

    # Find the optimizer's states by their parameters.
    optimizer = _read_optimizer(catalog, model, facts, rules, optim=optim, store=store)

    # Join the shapes of the ranks, and check them against the arguments.
    true_shapes = _join_shapes(
        model,
        optimizer.states,
        facts,
        rules,
        vocab_size=vocab_size,
        keep_padded_vocab=keep_padded_vocab,
        target_tp=target_tp,
    )
    shapes = true_shapes.shapes
    notes = [*catalog.notes, *optimizer.notes, *true_shapes.notes]
    if model.outer:
        notes.append(f"ckpt removes the prefix {model.outer!r} from the tensor names")
    if facts.pipeline.is_v_shaped and not is_v_shaped(fields_of(catalog.args)):
        notes.append(
            "the locations of the embedding and the output layer show that the pipeline is "
            "V-shaped, although the arguments do not say so"
        )

    # Rows that are stored in another order are put in order by their fragments.
    tensors = {**model.tensors, **optimizer.states}
    row_order = _order_rows(tensors, true_shapes.facts, version, catalog.args, extras.common)
    args, common = row_order.args, row_order.common
    notes += row_order.notes

    # Keep the tensors to which objects refer, and those of the optimizer that are not states.
    objects = extras.objects | {
        name: StoredObject(name, value=values[0]) for name, values in model.extra_states.items()
    }
    trees = (common, *(item.value for item in objects.values()), *extras.rng_states.values())
    hidden = {
        leaf.key: catalog.tensor(leaf.key) for leaf in walk(trees) if isinstance(leaf, TensorLeaf)
    }
    for key, arrays in optimizer.copies.items():
        first, *others = map(whole_tensor, arrays)
        hidden[key] = first.with_replicas(*others)

    unused = dropped_each(
        (facts.kind.head,) if facts.has_unused_head(facts.topology) else (),
        "not used, because with multi-token prediction and tied embeddings, the last stage "
        "computes its output with its copy of the embedding",
    )
    # Of the states that hold tensors none is kept.
    in_states = dropped_unlisted(
        _tensors_where(catalog, lambda name: f"{EXTRA_STATE}." in name), "in extra states"
    )
    unused_head = dropped_unlisted(
        {array.name: whole_tensor(array) for array in (*model.unused, *optimizer.unused)},
        "part of the unused output layer",
    )

    # Describe the form of the files, so that rank files can be written in the same form.
    root = as_mapping(next(iter(ranks.values()))[1]) or {}
    first_chunk = next((value for key, value in root.items() if is_chunk(key)), None)
    modules = sorted(model.versions, key=model.module_order.__getitem__)
    megatron = MegatronModel(
        expert_names=model.expert_names,
        module_versions={name: model.versions[name] for name in modules},
        wrapper=None if model.wrapper is None else model.wrapper.text,
        is_ordered=is_ordered(first_chunk),
        nesting={name: is_dict for name, is_dict in model.nesting.items() if name},
        top_level=tuple(dict.fromkeys("model" if is_chunk(key) else key for key in root)),
        vocab_size=true_shapes.n_rows,
        is_down_proj_cut=is_down_proj_cut,
        rng_states=extras.rng_states,
        order=tuple(sorted(model.order, key=model.order.__getitem__)),
    )
    fragments = _RankFragments(tensors, shapes, true_shapes.facts)
    return replace(
        catalog,
        tensors={
            name: Tensor(
                tensors[name].parts[0].array.dtype,
                shape,
                bind_argument(fragments.list_fragments, name),
            )
            for name, shape in shapes.items()
        },
        objects=objects,
        hidden=hidden,
        files=catalog.documents,
        skeleton=None,
        iteration=get_iteration(common),
        args=args,
        common=common,
        optimizer=optimizer.optimizer,
        notes=tuple(notes),
        dropped=(
            *catalog.dropped,
            *record_attributes(_list_lost_attributes(ranks, optim=optim)),
            *extras.dropped,
            *lost_states,
            *in_states,
            *unused,
            *unused_head,
            *optimizer.dropped,
            *dropped_unlisted(fragments.list_padding(), PADDING),
        ),
        facets={Topology: facts.topology, MegatronModel: megatron},
    )


def ranks_of(catalog: Catalog) -> Mapping[Coords, tuple[str, object]]:
    """Return the ranks of a rank catalog: coordinates → (directory, content of its file)."""
    facts = catalog.facet(RankFacts)
    assert facts is not None, "a rank catalog lists its ranks"
    return facts.ranks


def facts_of_ranks(
    args: object, ranks: Mapping[Coords, tuple[str, object]], rules: Rules
) -> ModelFacts:
    """Return what the arguments of a rank checkpoint and its names say about the model.

    Args:
        args: the training arguments.
        ranks: coordinates → (directory, content of its file).

    Raises:
        UnsupportedError, CorruptError: as for ``parse_facts``.
    """
    facts = parse_facts(args, names=rules.model_of(_local_names(ranks, rules)))
    return with_v_shape(facts, ranks, rules)


def _local_names(ranks: Mapping[Coords, tuple[str, object]], rules: Rules) -> Iterator[str]:
    """Yield the local names in all chunks of every pipeline stage, from one rank of each."""
    stages = {dict(coords).get("pp"): file for coords, file in ranks.items()}
    for folder, root in stages.values():
        for chunk, container in (as_mapping(root) or {}).items():
            if is_chunk(chunk) and as_mapping(container) is not None:
                flat = flattened(container, rank=folder)
                yield from without_outer_names(flat, rules).entries


@dataclass(frozen=True, slots=True)
class _RankOptimizer:
    """The optimizer of rank files in the global per-layer form.

    Args:
        optimizer: groups and settings; None if the optimizer is not carried.
        states: key of a state → its shards.
        copies: key of a hidden tensor → the equal arrays that hold it.
        notes, dropped: notes for the user.
        unused: states of an output layer that is not used.
    """

    optimizer: Optimizer | None = None
    states: Mapping[str, RankTensor] = field(default_factory=dict)
    copies: Mapping[str, Sequence[StoredArray]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[Dropped] = ()
    unused: Sequence[StoredArray] = ()


def _read_optimizer(
    catalog: Catalog,
    model: RankModel,
    facts: ModelFacts,
    rules: Rules,
    *,
    optim: str,
    store: ReadStore | None,
) -> _RankOptimizer:
    """Read the optimizer of the files, or note that it is dropped.

    Raises:
        UnsupportedError: ``optim`` is ``refuse``, or the optimizer's kind is not supported.
        CorruptError: ranks contradict each other.
    """
    # Describe the kind in words for people: the catalog does not name those of model_optim_rng.pt.
    rank_facts = catalog.facet(RankFacts)
    kind = None if rank_facts is None else rank_facts.optimizer_kind
    if kind is None:
        if all(file.root.get(OPTIMIZER) is None for file in model.files.values()):
            return _RankOptimizer()
        kind = "in model_optim_rng.pt"
    if optim != "carry":
        # Other tensors than those of the model and the optimizer are in objects.
        of_optimizer = _tensors_where(catalog, lambda name: not is_chunk(name.partition(".")[0]))
        record = record_dropped_optimizer(str(kind), of_optimizer.values(), optim=optim)
        return _RankOptimizer(dropped=[record])

    # Put the states of all ranks under the global names of their parameters.
    from core.megatron.reshard.rank_optimizer import find_rank_states

    result = find_rank_states(catalog, tuple(model.files.values()), facts, rules, store=store)
    states: dict[str, RankTensor] = {}
    unused: list[StoredArray] = []
    for state in result.states:
        chunk = state.param.chunk
        for _, global_name, array in chunk.arrays(state.param.name, state.array):
            name = global_name
            # A copy of tied embeddings is not a tensor of its own.
            if name not in model.tensors:
                tied = chunk.rules.rule_of(name).tied
                assert tied is not None and facts.is_tied, "every tensor of a rank was merged"
                if facts.has_unused_head(facts.topology):
                    unused.append(array)
                    continue
                name = tied
            key = state_key(state.state, name)
            if key not in states:
                states[key] = RankTensor(model.tensors[name].rule)
            states[key].parts.append(RankPart(chunk.rank, chunk.folder, array))
    # The layer-wise optimizer stores the part of data parallel rank 0 a second time.
    copies: tuple[Dropped, ...] = ()
    if kind == "layer-wise":
        first = _tensors_where(catalog, lambda name: name.startswith(f"{OPTIMIZER}."))
        copies = dropped_unlisted(first, "also in layer_wise_optimizer_0.pt")
    return _RankOptimizer(
        optimizer=result.optimizer,
        states=states,
        copies={**result.beside, **({STEP: result.steps} if result.steps else {})},
        notes=result.notes,
        dropped=(*result.dropped, *copies),
        unused=unused,
    )


def _tensors_where(catalog: Catalog, matches: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors of a rank catalog whose names, without the rank, match."""
    tensors = catalog.tensors.items()
    return {key: tensor for key, tensor in tensors if matches(key.partition(":")[2])}


def _list_lost_attributes(
    ranks: Mapping[Coords, tuple[str, object]], *, optim: str
) -> Iterator[str]:
    """Yield the keys of the attributes of those mappings in rank files that are taken apart.

    The versions of modules are kept (``MegatronModel``), and so is what is in extra states.
    """
    keys: dict[str, None] = {}
    for _, root in ranks.values():
        keys |= {name: None for name, _ in own_attributes(root)}
        for name, value in (as_mapping(root) or {}).items():
            if not (is_chunk(name) or (name == OPTIMIZER and optim == "carry")):
                continue
            keys |= {
                f"{name}.{attribute.key}": None
                for attribute in attributes_of(value)
                if not (is_chunk(name) and attribute.name == VERSIONS)
                and not any(str(part).endswith(EXTRA_STATE) for part in attribute.path)
            }
    yield from keys


def _empty_lost_states(model: RankModel, store: ReadStore | None) -> list[Dropped]:
    """Empty the extra states that cannot be kept (``core.megatron.extras.extra_states``).

    Returns:
        The record of each of them.

    Raises:
        UnsupportedError: an opaque tensor other than an extra state differs between ranks.
    """
    dropped: list[Dropped] = []
    # A state may be a tensor on some ranks and an object on others.
    tensors = {
        name: tensor for name, tensor in model.tensors.items() if tensor.rule.kind == "opaque"
    }
    for name in (*tensors, *(name for name in model.extra_states if name not in tensors)):
        arrays = [part.array for part in tensors[name].parts] if name in tensors else []
        reason = disagreement(model.extra_states.get(name, ()), arrays, store)
        if reason is None:
            continue
        if not name.endswith(EXTRA_STATE):
            problem = reason.partition(";")[0]
            raise UnsupportedError(f"opaque tensors cannot be resharded: {problem}", key=name)
        dropped.append(Dropped((name,), reason, tensors=tuple(map(whole_tensor, arrays))))
        model.tensors.pop(name, None)
        model.extra_states[name] = [None]
    return dropped


def settle_rules(model: RankModel, facts: ModelFacts) -> bool:
    """Adapt the rules of tensors to their shapes: a value head is complete on every rank.

    Tensors that the rule replicates, but of which every rank has only its share, are cut. One TP
    rank alone does not show that. It is then assumed for multi-latent attention in the local
    implementation, which cuts its down projections, and for keys and values of several heads.

    Returns:
        True if a tensor is cut contrary to its rule.
    """
    tp = facts.topology.tp
    is_cut = facts.is_mla and facts.is_local and tp == 1
    for name, tensor in model.tensors.items():
        shape = tensor.parts[0].array.shape
        rule = tensor.rule = tensor.rule.for_shape(shape)
        if (
            not rule.may_be_cut
            or rule.axis is None
            or rule.axis >= min(len(shape), len(rule.shape))
        ):
            continue
        size, rows = rule.shape[rule.axis], shape[rule.axis]
        extent = None if size is None else size.value(sizes_for(name, facts))
        has_share = rows != extent and rows * tp == extent
        if has_share or (tp == 1 and rule.unit == "heads" and facts.n_groups > 1):
            tensor.rule = rule.as_cut()
            is_cut = True
    return is_cut


def global_shape_of(
    name: str, tensor: RankTensor, topology: Topology, *, like: RankTensor | None = None
) -> Shape:
    """Return the global shape of a tensor after checking that its shards agree.

    Args:
        like: the parameter, if the tensor is one of its states, whose shards must then have the
            parameter's shape.

    Raises:
        CorruptError: ranks differ in dtype or shape, or the tensor does not have the axis that its
            rule cuts.
    """
    first = tensor.parts[0]
    axis = tensor.rule.cut_axis
    shape = first.array.shape if like is None else like.parts[0].array.shape
    for part in tensor.parts:
        if part.array.shape != shape or part.array.dtype != first.array.dtype:
            raise CorruptError(
                f"the tensor is {part.array.dtype} of shape {part.array.shape} here, but "
                f"{first.array.dtype} of shape {first.array.shape} in {first.folder}",
                key=name,
                rank=part.folder,
            )
    if axis is not None and axis >= len(first.array.shape):
        raise CorruptError(
            f"the tensor's shape is {first.array.shape}, but its rule splits axis {axis}", key=name
        )
    return global_shape(first.array.shape, axis, topology.size_of(tensor.rule.group))


@dataclass(frozen=True, slots=True)
class _JoinedShapes:
    """The global shapes of a model.

    Args:
        shapes: key of a tensor or state → shape without dropped padding, in the order of the files.
        n_rows: rows of the vocabulary without padding, or None if unknown.
        facts: facts about the model, with the sizes that only shapes show.
        notes: notes for the user.
    """

    shapes: Mapping[str, Shape]
    n_rows: int | None
    facts: ModelFacts
    notes: Sequence[str]


def _join_shapes(
    model: RankModel,
    states: Mapping[str, RankTensor],
    facts: ModelFacts,
    rules: Rules,
    *,
    vocab_size: int | None,
    keep_padded_vocab: bool,
    target_tp: int | None,
) -> _JoinedShapes:
    """Join the shapes of the ranks, check them, and drop padding rows of the vocabulary.

    Raises:
        CorruptError: shapes contradict each other or the arguments.
        UnsupportedError: the arguments do not give the sizes of a tensor's parts.
        UsageError: ``vocab_size`` does not fit the stored rows.
    """
    # Find the size of the vocabulary: TP ranks hold equal numbers of rows, padding included.
    stored_rows = [
        tensor.parts[0].array.shape[0] * facts.topology.tp
        for tensor in model.tensors.values()
        if tensor.rule.kind == "vocab" and tensor.parts[0].array.shape
    ]
    true_rows = find_true_rows(
        facts, given=vocab_size, keep_padded=keep_padded_vocab, stored=stored_rows
    )

    # Check the shapes with all padding: the arguments and rules describe the stored tensors.
    stored = {
        name: global_shape_of(name, tensor, facts.topology)
        for name, tensor in model.tensors.items()
    }
    sized_facts = with_sizes(facts, stored, rules)
    rule_of = {name: tensor.rule for name, tensor in model.tensors.items()}
    check_shapes(stored, rule_of, sized_facts, n_joined=facts.topology.size_of)
    for name, shape in stored.items():
        check_parts(rule_of[name], shape, sized_facts, key=name)

    # Drop the padding, also that of the states.
    order = sorted(model.order, key=model.order.__getitem__)
    shapes = {name: stored[name] for name in order if name in stored}
    vocab_shapes = {
        name: shape for name, shape in shapes.items() if model.tensors[name].rule.kind == "vocab"
    }
    cut = cut_vocab(vocab_shapes, sized_facts, n_rows=true_rows.n_rows, target_tp=target_tp)
    shapes |= cut.shapes
    for key, state in states.items():
        global_shape_of(key, state, facts.topology, like=model.tensors[param_of(key)])
        shapes[key] = shapes[param_of(key)]
    notes = [*true_rows.notes, *gate_notes(facts, sized_facts), *cut.notes]
    return _JoinedShapes(shapes, true_rows.n_rows, sized_facts, notes)


@dataclass(frozen=True, slots=True)
class _RowOrder:
    """Arguments, entries and notes of a model whose rows were put into today's order.

    Args:
        args: the training arguments.
        common: the other entries.
        notes: notes for the user.
    """

    args: object
    common: Mapping[object, object]
    notes: Sequence[str]


def _order_rows(
    tensors: Mapping[str, RankTensor],
    facts: ModelFacts,
    version: float,
    args: object,
    common: Mapping[object, object],
) -> _RowOrder:
    """Set the order of the rows of query, key and value where it is not today's.

    Args:
        tensors: parameters and states by name.
        facts: facts about the model, with the sizes that shapes show.
        version: ``checkpoint_version`` of the files.
        args: the training arguments.
        common: the common state, with the arguments.

    Raises:
        UnsupportedError, CorruptError: as for ``old_rows`` and ``rows_by_part``.
    """
    notes: list[str] = []
    if version < OLDEST:
        from core.megatron.placement.qkv_order import CURRENT, old_rows

        for key, tensor in tensors.items():
            tensor.old_rows = old_rows(param_of(key), tensor.n_rows, version, facts)
        common = {**common, "checkpoint_version": CURRENT}
        notes.append(
            "reordered query, key and value rows from the layout of checkpoint_version "
            f"{version} to {CURRENT}"
        )
    if facts.kind.is_legacy and is_multi_query(fields_of(args)):
        from core.megatron.placement.qkv_order import rows_by_part

        for key, tensor in tensors.items():
            tensor.old_rows = rows_by_part(param_of(key), tensor.n_rows, facts)
        added = {
            "multi_query_attention": False,
            "group_query_attention": True,
            "num_query_groups": facts.n_groups,
        }
        args = replaced(args, {}, added=added)
        common = {**common, "args": args}
        notes.append(
            "reordered query, key and value rows from the layout of multi_query_attention to "
            "Megatron's grouped layout (group_query_attention)"
        )
    return _RowOrder(args, common, notes)


@dataclass(frozen=True, slots=True)
class _RankFragments:
    """A finder of the fragments of global tensors in the arrays of the ranks.

    Args:
        tensors: global key → the shards of the tensor.
        shapes: global key → shape, without dropped padding rows.
        facts: facts about the source.
    """

    tensors: Mapping[str, RankTensor]
    shapes: Mapping[str, Shape]
    facts: ModelFacts
    _pieces: dict[object, list[ShardPiece]] = field(default_factory=dict, init=False)
    """Cache of the pieces of a shard, by rule, shapes and rank: equal ones are cut alike."""

    def list_fragments(self, key: str) -> Sequence[Fragment]:
        """Return the fragments of a tensor in the order of the ranks, of each shard at least one.

        A shard that is only padding of the vocabulary has none.

        Raises:
            CorruptError: the sizes of the tensor's parts do not add up to its extent.
        """
        tensor = self.tensors[key]
        fragments: list[Fragment] = []
        for part in tensor.parts:
            for piece in self._pieces_of(key, tensor.rule, part):
                fragment = Fragment(piece.box, part.array, piece.at)
                if tensor.old_rows is None:
                    fragments.append(fragment)
                else:
                    fragments += tensor.old_rows.fragments(fragment)
        return tuple(fragments)

    def list_padding(self) -> dict[str, Tensor]:
        """Return the rows of shards that are padding of the vocabulary, by any name."""
        padding: dict[str, Tensor] = {}
        for key, tensor in self.tensors.items():
            for part in tensor.parts if tensor.rule.kind == "vocab" else ():
                pieces = self._pieces_of(key, tensor.rule, part)
                n_rows, n_stored = sum(piece.box.shape[0] for piece in pieces), part.array.shape[0]
                if n_rows < n_stored:
                    rows = whole_tensor(part.array).narrow(0, n_rows, n_stored - n_rows)
                    padding[part.array.name] = rows
        return padding

    def _pieces_of(self, key: str, rule: Rule, part: RankPart) -> list[ShardPiece]:
        """Return the pieces of a tensor that a rank's array holds, without padding."""
        shape, axis = self.shapes[key], rule.cut_axis
        number = 0 if axis is None else part.rank.within(rule.group)
        kind = (id(rule), shape, part.array.shape, number)
        if kind in self._pieces:
            return self._pieces[kind]
        if axis is None:
            pieces = replicated_pieces(shape)
        else:
            n = self.facts.topology.size_of(rule.group)
            padded = global_shape(part.array.shape, axis, n)
            extents = measure_parts(rule, padded[axis], self.facts, key=key)

            # A single shard has the parts of the axis in the order of the tensor: one piece.
            pieces = replicated_pieces(padded)
            if n > 1:
                pieces = split_axis(padded, axis, parts=extents, rank=number, n=n)
            trimmed_pieces = (trim_piece(piece, axis, shape[axis]) for piece in pieces)
            pieces = [piece for piece in trimmed_pieces if piece is not None]
        self._pieces[kind] = pieces
        return pieces
