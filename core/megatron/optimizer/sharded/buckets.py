"""Optimizer state that torch_dist keeps as the distributed optimizer's flat buffers.

::

    [chained_1.]optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param
                                      rank of the    buffer                                           bucket       state
                                      model replica
    …dp_group_idx_3.{per_bucket_numel,per_bucket_numel_unpadded,optimizer}                            objects

in the forms ``dp_reshardable`` (core 0.15 and later, its default) and ``fully_sharded_bucket_space`` (core ≤ 0.14, with
the padding at the end of buckets); ``dp_zero_gather_scatter`` has one object ``…dp_group_idx_3.param_state`` instead,
which is what distrib_optim.pt of rank files holds (``core.megatron.optimizer.flat.read``). Megatron loads all three
only at the TP and PP sizes that they were saved with.

The keys say which rank of a model replica a buffer is of, but not which parameters are in it: those that the rank held
(``core.megatron.optimizer.sharded.held``), in the order of ``core.megatron.optimizer.flat.buffers``. Masters are
compared with weights to prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.optimizer_keys import MASTER, Optimizer, state_key
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.args import fields_of
from core.megatron.model.facts import Facts
from core.megatron.model.topology import Rank, Topology
from core.megatron.optimizer.flat.boxes import fragments_of_run, runs_in
from core.megatron.optimizer.flat.buffers import Bucketing, bucketing_of
from core.megatron.optimizer.flat.groups import shared_groups
from core.megatron.optimizer.flat.layout import HINT, FlatParam, FlatSpace, starts_in
from core.megatron.optimizer.flat.params import is_distributed_expert, is_shared_embedding, members_at
from core.megatron.optimizer.sharded.bucket_keys import FlatBuffer, Group, Stored, groups_of
from core.megatron.optimizer.sharded.bucket_proof import Spots
from core.megatron.optimizer.sharded.held import Held, Holdings
from core.megatron.rules.rules import Rules

MARK = "optimizer.distributed.dp_group_idx_"
"""What the keys of buffers hold."""


@dataclass(frozen=True, slots=True)
class BucketStates:
    """The optimizer of a checkpoint with buffers, in the global per-layer form.

    Args:
        tensors: its states, by ``core.catalog.optimizer_keys.state_key``.
        fragments_of: their fragments.
        optimizer: the rest of it.
        hidden: the tensors in its entries; ``fragments_of`` answers for them too.
        notes: what the user should know.
    """

    tensors: Mapping[str, TensorMeta]
    fragments_of: Callable[[str], Sequence[Fragment]]
    optimizer: Optimizer
    hidden: Mapping[str, TensorMeta] = field(default_factory=dict)
    notes: Sequence[str] = ()


def has_buckets(catalog: Catalog) -> bool:
    """Whether a torch_dist catalog keeps its optimizer in buffers."""
    return any(MARK in key for key in (*catalog.tensors, *catalog.objects))


def read_buckets(
    catalog: Catalog, model: Catalog, facts: Facts, rules: Rules, *, store: ReadStore | None
) -> BucketStates:
    """The optimizer out of the buffers.

    Args:
        catalog: of torch_dist, its objects loaded.
        model: the global per-layer form of its weights.
        facts: of the run that saved.
        store: the checkpoint's files, to compare masters with weights; None leaves that out.

    Raises:
        UnsupportedError: it is not determined, or nothing proves, which parameter is where.
        MissingShardError: a rank's buffers are absent.
        CorruptError: buffers and arguments contradict each other.
    """
    if facts.expert_names == "grouped":
        raise UnsupportedError("the optimizer's buffers of grouped experts (GroupedMLP) are not read", hint=HINT)
    fields = fields_of(model.args if catalog.args is None else catalog.args)
    reader = _Reader(catalog, model, facts, rules, store, bucketing_of(fields))
    groups = groups_of(catalog)
    places: dict[str, list[_Place]] = {}
    notes: list[str] = []
    dtypes: dict[str, str] = {}
    for place in reader.places(groups, notes):
        places.setdefault(place.key, []).append(place)
        dtypes[place.key] = place.stored[0][1].dtype
    tensors = {
        key: TensorMeta(key, dtypes[key], model.tensors[found[0].held.key].shape) for key, found in places.items()
    }
    copies: dict[str, list[str]] = {}
    shared = shared_groups(
        [(group.label, group.entries) for group in groups.values()],
        lambda key, old: copies.setdefault(key, []).append(old),
    )
    states = dict.fromkeys(place.state for found in places.values() for place in found if place.state != MASTER)

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in copies:
            return tuple(replace(one, key=key) for old in copies[key] for one in catalog.fragments(old))
        return tuple(fragment for place in places[key] for fragment in place.fragments())

    hidden = {key: replace(catalog.meta(old[0]), key=key) for key, old in copies.items()}
    return BucketStates(tensors, fragments_of, shared.optimizer(states), hidden, notes)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank's shard of a state is: from an element of a flat tensor on."""

    state: str
    held: Held
    stored: Stored
    start: int

    @property
    def key(self) -> str:
        """Of the state."""
        return state_key(self.state, self.held.key)

    def fragments(self) -> Iterator[Fragment]:
        """The boxes of the global tensor that the shard's chunks hold."""
        shape = self.held.cut.shard_shape
        for run in runs_in(self.stored, self.start, prod(shape)):
            yield from fragments_of_run(self.key, run, self.held.pieces, shape=shape)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds the parameters in the buffers of all ranks."""

    catalog: Catalog
    model: Catalog
    facts: Facts
    rules: Rules
    store: ReadStore | None
    bucketing: Bucketing

    def places(self, groups: Mapping[tuple[int, int], Group], notes: list[str]) -> Iterator[_Place]:
        """Where every state of every parameter of every rank is."""
        topology = self.facts.topology
        holdings = Holdings(self.model, self.facts, self.rules)
        members = members_at(topology, self.bucketing, has_experts=topology.ep > 1)
        for extra in groups:
            if extra[0] >= len(members) or extra[1] >= _n_groups(topology, is_expert=members[extra[0]].is_expert):
                raise CorruptError(f"there are buffers of {groups[extra].label}, but {topology} has no such rank")
        for number, member in enumerate(members):
            for index in range(_n_groups(topology, is_expert=member.is_expert)):
                rank = _rank_of(topology, index, is_expert=member.is_expert)
                every = holdings.of(rank)
                held = [
                    one
                    for one in every
                    if one.vp_rank in member.chunks
                    and is_distributed_expert(one.name, topology, self.rules) == member.is_expert
                ]
                group = groups.get((number, index))
                if group is None and held:
                    raise MissingShardError(
                        f"the optimizer's buffers of {rank} are not there (dp_group_idx_{index})",
                        key=held[0].key,
                        hint="copy the checkpoint again, or leave the optimizer out with --no-optim",
                    )
                if group is not None:
                    n_rank = sum(prod(one.cut.shard_shape) for one in every)
                    yield from self._group_places(group, held, rank, n_rank, notes)

    def _group_places(
        self, group: Group, held: Sequence[Held], rank: Rank, n_rank: int, notes: list[str]
    ) -> Iterator[_Place]:
        """Buffers in order: chunk by chunk, one a dtype in the order in which dtypes appear."""
        buffers = iter(enumerate(group.buffers))
        for vp_rank in dict.fromkeys(one.vp_rank for one in held):
            left = [one for one in held if one.vp_rank == vp_rank]
            while left:
                number, buffer = next(buffers, (len(group.buffers), None))
                dtype = self._dtype(left[0])
                label = f"buffer {number} of {group.label}"
                if buffer is None or buffer.dtype not in (None, dtype):
                    raise CorruptError(f"{label} should hold {dtype} parameters such as {left[0].key}")
                mine = [one for one in left if buffer.dtype is None or self._dtype(one) == dtype]
                left = [one for one in left if buffer.dtype is not None and self._dtype(one) != dtype]
                yield from self._buffer_places(buffer, mine, rank, n_rank, label, notes)
        extra = next(buffers, None)
        if extra is not None:
            raise CorruptError(f"there is a buffer {extra[0]} of {group.label}, but no parameter for it")

    def _dtype(self, held: Held) -> str:
        return self.model.tensors[held.key].dtype

    def _buffer_places(
        self, buffer: FlatBuffer, held: Sequence[Held], rank: Rank, n_rank: int, label: str, notes: list[str]
    ) -> Iterator[_Place]:
        topology = self.facts.topology
        space = FlatSpace(
            params=[
                FlatParam(
                    one.key,
                    prod(one.cut.shard_shape),
                    is_shared_embedding(one.name, topology, self.facts, self.rules),
                )
                for one in held
            ],
            n_elements=buffer.n_elements,
            buckets=buffer.buckets,
            bucketing=self.bucketing,
            chunk=(held[0].vp_rank, rank.pp),
            n_rank=n_rank,
            n_copies=self.bucketing.n_ranks,
            label=label,
            rank=f"TP {rank.tp}, PP {rank.pp}, EP {rank.ep}",
        )
        fits = None if self.store is None else self._proof(buffer, held, self.store)
        starts = starts_in(space, fits, notes)
        for one, start in zip(held, starts, strict=True):
            for state, stored in buffer.states.items():
                yield _Place(state, one, stored, start)

    def _proof(self, buffer: FlatBuffer, held: Sequence[Held], store: ReadStore) -> Callable[[int, int], bool]:
        """Whether masters round to weights."""
        known: dict[int, Spots] = {}
        masters = buffer.states[MASTER]

        def fits(place: int, start: int) -> bool:
            if place not in known:
                one = held[place]
                known[place] = Spots(store, self.model, one.key, one.pieces, shape=one.cut.shard_shape)
            return known[place].hold(masters, start, bind=self.catalog.bind)

        return fits


def _n_groups(topology: Topology, *, is_expert: bool) -> int:
    """Model parallel ranks whose data parallel ranks share buffers."""
    return topology.expert_tp * topology.ep * topology.pp if is_expert else topology.tp * topology.pp


def _rank_of(topology: Topology, index: int, *, is_expert: bool) -> Rank:
    """A rank of a data parallel group: TP ranks count first, then (for experts) EP ranks, then stages."""
    pp_rank, inner = divmod(index, topology.expert_tp * topology.ep if is_expert else topology.tp)
    for rank in topology.ranks():
        if rank.pp != pp_rank:
            continue
        if (rank.etp + topology.expert_tp * rank.ep if is_expert else rank.tp) == inner:
            return rank
    raise CorruptError(f"{topology} has no rank of the data parallel group {index}")
