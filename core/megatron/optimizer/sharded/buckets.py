"""Optimizer state that torch_dist stores as the distributed optimizer's flat buffers.

The key of a tensor consists of::

    [chained_1.]optimizer.distributed.       distributed experts' optimizer, if chained
    dp_group_idx_3.                          rank of a model replica
    gbuf_idx_0.                              buffer
    dtype_(torch.bfloat16, torch.float32).   dtypes of parameters and gradients
    bucket_idx_0.                            bucket
    param                                    state

and each ``…dp_group_idx_3.`` has the objects ``per_bucket_numel``, ``per_bucket_numel_unpadded``
and ``optimizer``, in the forms ``dp_reshardable`` (core 0.15 and later, its default) and
``fully_sharded_bucket_space`` (core ≤ 0.14, with the padding at the end of buckets). In
``dp_zero_gather_scatter``, one object ``…dp_group_idx_3.param_state`` contains what rank files
store in distrib_optim.pt (``core.megatron.optimizer.flat.read``). Megatron loads all three forms
only at the TP and PP sizes that they were saved with.

The keys give the rank of a buffer, but not the parameters in it: these are the parameters of the
rank (``Holdings``), in the order of
``core.megatron.optimizer.flat.buffers``. Comparing master weights with weights proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import prod

from core.arrays.sharding import ShardPiece, trim_piece
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.flat_runs import fragments_of_run, runs_in
from core.engine.catalog.optimizer_keys import MASTER, Optimizer, param_of, state_key
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.extras.order import Place, place_of
from core.megatron.model.args import fields_of
from core.megatron.model.cut import Cut, cuts_of
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Rank, Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.flat.buffers import (
    Bucketing,
    bucketing_of,
    is_distributed_expert,
    is_shared_embedding,
    members_at,
)
from core.megatron.optimizer.flat.groups import combine_ranks
from core.megatron.optimizer.flat.layout import (
    HINT,
    FlatParam,
    FlatSpace,
    find_starts,
    find_trained,
)
from core.megatron.optimizer.remainders import are_remainders, remainders_error
from core.megatron.optimizer.sharded.bucket_keys import (
    BucketGroup,
    FlatBuffer,
    Stored,
    group_buffers,
)
from core.megatron.optimizer.sharded.bucket_proof import WeightSamples
from core.megatron.placement.homes import Home, by_chunk, by_file_order, homes_at, tied_of
from core.megatron.rules.rules import Rules
from core.values import dataclass

MARK = "optimizer.distributed.dp_group_idx_"
"""Text that only keys of buffers contain."""


@dataclass(frozen=True, slots=True)
class GlobalStates:
    """The optimizer of a checkpoint of global tensors, in the global per-layer form.

    Args:
        tensors: states of the optimizer, by ``core.engine.catalog.optimizer_keys.state_key``.
        optimizer: settings and groups.
        hidden: tensors in the optimizer's entries, and the number of steps (``STEP``).
        notes, dropped: for the catalog's fields of these names.
    """

    tensors: Mapping[str, Tensor]
    optimizer: Optimizer
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[Dropped] = ()


def has_buckets(catalog: Catalog) -> bool:
    """Return whether a torch_dist catalog stores its optimizer in buffers."""
    return any(MARK in key for key in (*catalog.tensors, *catalog.objects))


def read_buckets(
    catalog: Catalog, model: Catalog, facts: ModelFacts, rules: Rules, *, store: ReadStore | None
) -> GlobalStates:
    """Read an optimizer that is stored in buffers.

    Args:
        catalog: a torch_dist catalog with loaded objects.
        model: the global per-layer form of the catalog's weights.
        facts: facts about the run that saved.
        store: the checkpoint's files, to compare master weights with weights; None to skip that.

    Raises:
        UnsupportedError: the offsets of the parameters are unknown or cannot be proven.
        MissingShardError: a rank's buffers are missing.
        CorruptError: buffers and arguments contradict each other.
    """
    if facts.expert_names == "grouped":
        raise UnsupportedError(
            "reading optimizer buffers of grouped experts (GroupedMLP) is not supported",
            hint=HINT,
        )

    # Find every state of every parameter in the buffers.
    fields = fields_of(model.args if catalog.args is None else catalog.args)
    reader = _BucketReader(catalog, model, facts, rules, store, bucketing_of(fields))
    groups = group_buffers(catalog)
    places: dict[str, list[_StatePlace]] = {}
    dtypes: dict[str, str] = {}
    for place in reader.places(groups):
        places.setdefault(place.key, []).append(place)
        dtypes[place.key] = place.stored[0][1].dtype
    partly = [key for key in places if param_of(key) in reader.untrained]
    if partly:
        raise CorruptError(
            "the optimizer's buffers contain this parameter on some ranks but not on others",
            key=param_of(partly[0]),
            hint=HINT,
        )
    tensors = {
        key: Tensor(
            dtypes[key],
            model.tensors[of_key[0].param.key].shape,
            partial(_list_fragments, of_key),
        )
        for key, of_key in places.items()
    }

    # Combine the groups and entries of all ranks.
    copies: dict[str, list[str]] = {}
    optimizer = combine_ranks(
        [(group.label, group.entries) for group in groups.values()],
        lambda key, old: copies.setdefault(key, []).append(old),
        states=dict.fromkeys(
            place.state for of_key in places.values() for place in of_key if place.state != MASTER
        ),
    )

    # Hidden tensors are those of the first rank; the other ranks' are copies.
    hidden = {}
    for key, old_keys in copies.items():
        first, *others = map(catalog.tensor, old_keys)
        hidden[key] = first.with_replicas(*others)
    return GlobalStates(tensors, optimizer, hidden, reader.notes)


def _list_fragments(places: Iterable[_StatePlace]) -> list[Fragment]:
    """Return the fragments of a state that all ranks hold."""
    return [fragment for place in places for fragment in place.fragments()]


@dataclass(frozen=True, slots=True)
class _StatePlace:
    """A rank's shard of a state, which begins at element ``start`` of a flat tensor."""

    state: str
    param: BucketParam
    stored: Stored
    start: int

    @property
    def key(self) -> str:
        """Global key of the state."""
        return state_key(self.state, self.param.key)

    def fragments(self) -> Iterator[Fragment]:
        """Yield the fragments of the global tensor that the shard's chunks hold."""
        shape = self.param.cut.shard_shape
        for run in runs_in(self.stored, self.start, prod(shape)):
            yield from fragments_of_run(run, self.param.pieces, shape=shape)


@dataclass(frozen=True, slots=True)
class _BucketReader:
    """A reader of the buffers of all ranks.

    It collects notes for the user, and the keys of parameters that a rank's buffers do not hold
    because they are not trained.
    """

    catalog: Catalog
    model: Catalog
    facts: ModelFacts
    rules: Rules
    store: ReadStore | None
    bucketing: Bucketing
    notes: list[str] = field(default_factory=list)
    untrained: set[str] = field(default_factory=set)

    def places(self, groups: Mapping[tuple[int, int], BucketGroup]) -> Iterator[_StatePlace]:
        """Yield the places of all states of all ranks.

        Args:
            groups: the result of ``groups_of``.
        """
        # No rank may have more buffers than the saved sizes have ranks.
        topology = self.facts.topology
        holdings = Holdings(self.model, self.facts, self.rules)
        members = members_at(topology, self.bucketing, has_experts=topology.ep > 1)
        for number, index in groups:
            if number >= len(members) or index >= _n_groups(
                topology, is_expert=members[number].is_expert
            ):
                label = groups[number, index].label
                raise CorruptError(
                    f"the checkpoint has buffers for {label}, but {topology} has no such group"
                )

        # Every rank of the saved sizes must have its buffers.
        for number, member in enumerate(members):
            for index in range(_n_groups(topology, is_expert=member.is_expert)):
                rank = _rank_of(topology, index, is_expert=member.is_expert)
                all_params = holdings.of(rank)
                params = [
                    param
                    for param in all_params
                    if param.vp_rank in member.chunks
                    and is_distributed_expert(param.name, topology, self.rules) == member.is_expert
                ]
                group = groups.get((number, index))
                if group is None and params:
                    raise MissingShardError(
                        f"the optimizer buffers for {rank} are missing (dp_group_idx_{index})",
                        key=params[0].key,
                        hint="copy the checkpoint again, or drop the optimizer with --no-optim",
                    )
                if group is not None:
                    n_rank = sum(prod(param.cut.shard_shape) for param in all_params)
                    yield from self._group_places(group, params, rank, n_rank)

    def _group_places(
        self, group: BucketGroup, params: Sequence[BucketParam], rank: Rank, n_rank: int
    ) -> Iterator[_StatePlace]:
        """Yield the places in a rank's buffers.

        Each chunk has a buffer for each dtype, in the order in which its parameters have them.

        Args:
            n_rank: number of elements of all the rank's parameters.
        """
        buffers = iter(enumerate(group.buffers))
        for vp_rank in dict.fromkeys(param.vp_rank for param in params):
            unread = [param for param in params if param.vp_rank == vp_rank]
            while unread:
                number, buffer = next(buffers, (len(group.buffers), None))
                dtype = self._dtype(unread[0])
                label = f"buffer {number} of {group.label}"
                if buffer is None or buffer.dtype not in (None, dtype):
                    problem = "is missing" if buffer is None else f"contains {buffer.dtype}"
                    raise CorruptError(
                        f"{label} {problem}, but should contain {dtype} parameters such as "
                        f"{unread[0].key}"
                    )

                # Old buffers, of no recorded dtype, hold all parameters of the chunk.
                of_buffer = [
                    param for param in unread if buffer.dtype is None or self._dtype(param) == dtype
                ]
                unread = [
                    param
                    for param in unread
                    if buffer.dtype is not None and self._dtype(param) != dtype
                ]
                yield from self._buffer_places(buffer, of_buffer, rank, n_rank, label)
        extra = next(buffers, None)
        if extra is not None:
            raise CorruptError(
                f"buffer {extra[0]} of {group.label} does not belong to any parameter"
            )

    def _dtype(self, param: BucketParam) -> str:
        return self.model.tensors[param.key].dtype

    def _buffer_places(
        self, buffer: FlatBuffer, params: Sequence[BucketParam], rank: Rank, n_rank: int, label: str
    ) -> Iterator[_StatePlace]:
        """Yield the places in one buffer; if a store is given, values prove them."""
        topology = self.facts.topology
        space = FlatSpace(
            params=[
                FlatParam(
                    param.key,
                    prod(param.cut.shard_shape),
                    is_shared_embedding(param.name, topology, self.facts, self.rules),
                )
                for param in params
            ],
            n_elements=buffer.n_elements,
            buckets=buffer.buckets,
            bucketing=self.bucketing,
            chunk=(params[0].vp_rank, rank.pp),
            n_rank=n_rank,
            label=label,
            rank=f"TP {rank.tp}, PP {rank.pp}, EP {rank.ep}",
        )

        # A layout counts only if master weights round to weights in it.
        store = self.store
        masters = buffer.states[MASTER]
        if are_remainders(None, masters[0][1]):
            raise remainders_error(key=params[0].key)
        samples: dict[int, WeightSamples] = {}

        def fits(place: int, start: int) -> bool:
            assert store is not None
            if place not in samples:
                param = params[place]
                samples[place] = WeightSamples(
                    store, self.model, param.key, param.pieces, shape=param.cut.shard_shape
                )
            return samples[place].hold(masters, start)

        # A buffer that is too short for all parameters holds the trained ones only.
        starts: Sequence[int | None] | None = None
        if store is not None and space.n_elements < sum(space.sizes):
            starts = find_trained(space, fits)
        if starts is None:
            try:
                result = find_starts(space, None if store is None else fits)
            except UnsupportedError:
                if are_remainders(store, masters[0][1]):
                    raise remainders_error(key=params[0].key) from None
                raise
            self.notes.extend(result.notes)
            starts = result.starts
        for param, start in zip(params, starts, strict=True):
            if start is None:
                self.untrained.add(param.key)
                continue
            for state, stored in buffer.states.items():
                yield _StatePlace(state, param, stored, start)


def _n_groups(topology: Topology, *, is_expert: bool) -> int:
    """Return the number of model parallel ranks whose data parallel ranks share buffers."""
    return (
        topology.expert_tp * topology.ep * topology.pp if is_expert else topology.tp * topology.pp
    )


def _rank_of(topology: Topology, index: int, *, is_expert: bool) -> Rank:
    """Return the first rank of a data parallel group.

    Args:
        index: number of the group: TP ranks vary fastest, then (for experts) EP ranks, then stages.
    """
    pp_rank, inner = divmod(index, topology.expert_tp * topology.ep if is_expert else topology.tp)
    for rank in topology.ranks():
        if rank.pp != pp_rank:
            continue
        if (rank.etp + topology.expert_tp * rank.ep if is_expert else rank.tp) == inner:
            return rank
    raise CorruptError(f"no rank of {topology} belongs to data-parallel group {index}")


@dataclass(frozen=True, slots=True)
class BucketParam:
    """A parameter of a rank.

    Args:
        key: global name of the tensor.
        name: name of the parameter in the rank's file.
        vp_rank: number of the model chunk.
        cut: cut of the tensor; its shape is that of the run, with vocabulary padding.
        pieces: regions of the global tensor in the rank's shard, without vocabulary padding.
    """

    key: str
    name: str
    vp_rank: int
    cut: Cut
    pieces: tuple[ShardPiece, ...]


class Holdings:
    """The parameters of all ranks of the run that saved.

    Args:
        model: the global per-layer form, without an optimizer.
        facts: facts about the run.

    Raises:
        UnsupportedError, CorruptError: as for ``core.megatron.model.cut.cuts_of`` and
        ``core.megatron.placement.homes.Homes.home``.
    """

    def __init__(self, model: Catalog, facts: ModelFacts, rules: Rules) -> None:
        self._model = model
        self._rules = rules
        # The run's own padding is recorded, and need not be that of a divisor times TP.
        n_padded, tp = facts.sizes.get("padded_vocab_size"), facts.topology.tp
        if n_padded is not None and n_padded % tp == 0:
            facts = replace(facts, divisible_by=n_padded // tp)
        self._cuts = cuts_of(model, facts.topology, facts, rules, n_rows=rows_of(model, None))

        # File positions of every parameter; the last stage has a copy of a tied embedding.
        places = homes_at(model, facts.topology, facts, rules)
        homes = [
            (key, home)
            for key in model.tensors
            if rules.is_param(key)
            for home in places.homes(key)
        ]
        head = facts.kind.head
        tied = tied_of(model, facts, rules) if facts.topology.pp > 1 else None
        if tied is not None:
            homes.append((tied, places.last(head)))

        # The copy is in the position of the output layer, not of the embedding.
        def order(item: tuple[str, Home]) -> Place:
            key, home = item
            return place_of(head if home.name == head else key, rules)

        self._homes = by_chunk(sorted(homes, key=order))

    def of(self, rank: Rank) -> list[BucketParam]:
        """Return the parameters of a rank, chunk by chunk, in the order of its file."""
        params = []
        for (vp_rank, pp_rank), homes in sorted(self._homes.items()):
            if pp_rank != rank.pp:
                continue
            names = [(key, home.name) for key, home in homes if home.has(rank)]
            for key, name in by_file_order(names, self._rules):
                cut = self._cuts[key]
                params.append(BucketParam(key, name, vp_rank, cut, self._pieces(key, cut, rank)))
        return params

    def _pieces(self, key: str, cut: Cut, rank: Rank) -> tuple[ShardPiece, ...]:
        """Return the regions of a tensor in a rank's shard, without vocabulary padding."""
        pieces = cut.pieces(rank)
        axis, shape = cut.axis, self._model.tensors[key].shape
        if axis is None:
            return tuple(pieces)
        kept = (trim_piece(piece, axis, shape[axis]) for piece in pieces)
        return tuple(piece for piece in kept if piece is not None)
