"""Reading the distributed optimizer of rank files: distrib_optim.pt, groups in model_optim_rng.pt.

The file of a rank contains the states of all data parallel ranks, so it does not depend on their
number. A buffer lists no names: the offsets of parameters follow from the order of the state dict
(``core.megatron.optimizer.flat.buffers``) and are proven by the values
(``core.megatron.optimizer.proof``). Parameters that are not trained have no place in a buffer;
which ones these are is known by the values alone.

Supported are files of megatron-core since the first ``distrib_optim.pt`` (2023-05), before and
after buckets were coalesced (2024-02). Not supported: buffers of FP8 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import field
from math import prod

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.optimizer_keys import MASTER
from core.engine.catalog.stored import StoredArray, narrow_array
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    raising,
)
from core.files.store import ReadStore
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.flat.buffers import (
    Bucketing,
    bucketing_of,
    is_distributed_expert,
    is_shared_embedding,
    members_of_file,
)
from core.megatron.optimizer.flat.content import Buffer, buffers_of, members_of
from core.megatron.optimizer.flat.groups import combine_ranks
from core.megatron.optimizer.flat.layout import FlatParam, FlatSpace, find_starts, find_trained
from core.megatron.optimizer.proof import are_masters, is_master
from core.megatron.optimizer.rank_state import Param, ParamState, RankFile, RankStates
from core.megatron.optimizer.remainders import are_remainders, remainders_error
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf
from core.values import dataclass


def read_flat(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: ModelFacts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """Read the distributed optimizer of a rank catalog.

    ``core.megatron.reshard.rank_optimizer.find_rank_states`` explains the arguments.

    Raises:
        MissingShardError: no rank has the optimizer state of some parameter.
        UnsupportedError: the offset of a parameter in its buffer is unknown or cannot be proven.
        CorruptError: a file's content contradicts the model or other ranks.
    """
    # Read the buffers of every rank that has a distrib_optim.pt.
    ranks = catalog.facet(RankFacts)
    assert ranks is not None, "a rank catalog lists the content of its files"
    reader = _BufferReader(catalog, facts, rules, store, bucketing_of(fields_of(catalog.args)))
    states: list[ParamState] = []
    unread: set[str] = set()
    for file in files:
        content = ranks.optim_files.get(facts.topology.coords(file.rank))
        try:
            if content is not None:
                states += reader.read_states(file, content)
        except CheckpointingException as err:
            report(err.breaking("optim.buffers"))
            unread.add(file.folder)

    # A parameter is trained on all ranks, or on none.
    for state in states:
        if _global_name(state.param) in reader.untrained:
            raise CorruptError(
                "this parameter is in the optimizer's buffers on some ranks but not on others",
                key=_global_name(state.param),
                hint="drop the optimizer with --no-optim",
                rule="optim.buffers",
            )
    _check_covered(
        [file for file in files if file.folder not in unread],
        states,
        facts,
        rules,
        report,
        untrained=reader.untrained,
    )
    if reader.untrained:
        first = sorted(reader.untrained)
        reader.notes.append(
            f"{len(first)} parameter{'s are' if first[1:] else ' is'} not in the optimizer's "
            f"buffers and therefore not trained: {', '.join(first[:3])}{' …' if first[3:] else ''}"
        )

    # Tensors among groups' settings and other entries have a copy in the file of each rank.
    copies: dict[str, list[StoredArray]] = {}

    def note(key: str, old: str) -> None:
        copies.setdefault(key, []).append(reader.array_of(TensorLeaf(old)))

    entries = [(file.folder, file.root.get(OPTIMIZER)) for file in files]
    names = dict.fromkeys(state.state for state in states if state.state != MASTER)
    optimizer = combine_ranks(entries, note, states=names, report=report)
    return RankStates(optimizer, states, beside=copies, notes=tuple(reader.notes))


@dataclass(frozen=True, slots=True)
class _BufferReader:
    """A reader of the buffers of single ranks, which collects notes for the user.

    Args:
        untrained: global names of parameters that have no place in a buffer.
    """

    catalog: Catalog
    facts: ModelFacts
    rules: Rules
    store: ReadStore | None
    bucketing: Bucketing
    notes: list[str] = field(default_factory=list)
    untrained: set[str] = field(default_factory=set)

    def read_states(self, file: RankFile, content: object) -> Iterator[ParamState]:
        """Yield the states in a rank's distrib_optim.pt."""
        members = members_of(content, rank=file.folder)
        parts = members_of_file(
            self.facts.topology, self.bucketing, n_members=len(members), rank=file.folder
        )
        n_rank = sum(prod(param.array.shape) for param in file.params)
        for member, part in zip(members, parts, strict=True):
            if member is None:
                continue

            # Buffers follow one another chunk by chunk; the parameters must use them up.
            buffers = iter(buffers_of(member, self.array_of, rank=file.folder))
            for vp_rank in part.chunks:
                params = [
                    param
                    for param in file.params
                    if param.chunk.where[0] == vp_rank
                    and part.is_expert
                    == is_distributed_expert(param.name, self.facts.topology, self.rules)
                    and self.rules.is_param(_global_name(param))
                ]
                yield from self._read_chunk(file, params, buffers, n_rank)
            extra = next(buffers, None)
            if extra is not None:
                raise CorruptError(
                    f"buffer {extra.number} belongs to no parameter",
                    rank=file.folder,
                )

    def array_of(self, leaf: TensorLeaf) -> StoredArray:
        """Return the array of a leaf."""
        array = self.catalog.fragments(leaf.key)[0].array
        assert array is not None
        return array

    def _read_chunk(
        self, file: RankFile, params: Sequence[Param], buffers: Iterator[Buffer], n_rank: int
    ) -> Iterator[ParamState]:
        """Yield the states of one model chunk.

        A chunk has a buffer for each dtype, in the order in which its parameters have them.
        """
        unread = list(params)
        while unread:
            buffer = next(buffers, None)
            if buffer is None:
                raise CorruptError(f"no buffer contains {unread[0].name}", rank=file.folder)
            dtype = unread[0].array.dtype
            if buffer.dtype not in (None, dtype):
                raise CorruptError(
                    f"buffer {buffer.number} is for {buffer.dtype} parameters, but should be for "
                    f"{dtype} parameters such as {unread[0].name}",
                    rank=file.folder,
                )

            # Old files have one buffer, of no recorded dtype, for all parameters.
            of_buffer = [
                param for param in unread if buffer.dtype is None or param.array.dtype == dtype
            ]
            unread = [
                param for param in unread if buffer.dtype is not None and param.array.dtype != dtype
            ]
            yield from self._read_buffer(file, of_buffer, buffer, n_rank)

    def _read_buffer(
        self, file: RankFile, params: Sequence[Param], buffer: Buffer, n_rank: int
    ) -> Iterator[ParamState]:
        """Yield the states in one buffer; if a store is given, values prove the offsets."""
        space = FlatSpace(
            params=[
                FlatParam(
                    param.name,
                    prod(param.array.shape),
                    is_shared_embedding(
                        _global_name(param), self.facts.topology, self.facts, self.rules
                    ),
                )
                for param in params
            ],
            n_elements=buffer.n_elements,
            buckets=buffer.buckets,
            bucketing=self.bucketing,
            chunk=params[0].chunk.where,
            n_rank=n_rank,
            label=f"buffer {buffer.number}",
            rank=file.folder,
        )

        # A layout counts only if master weights round to weights in it.
        store = self.store

        def fits(place: int, start: int) -> bool:
            assert store is not None
            weight = params[place].array
            master = _part(buffer, MASTER, start, weight)
            return master is not None and is_master(store, master, weight)

        def all_fit(starts: Sequence[int]) -> bool:
            assert store is not None
            pairs = []
            for param, start in zip(params, starts, strict=True):
                master = _part(buffer, MASTER, start, param.array)
                if master is None:
                    return False
                pairs.append((master, param.array))
            return are_masters(store, pairs)

        # Cut the parameters' shards out of the buffer's states.
        starts: Sequence[int | None] | None = None
        if store is not None and buffer.buckets is None and space.n_elements < sum(space.sizes):
            starts = find_trained(space, fits)
        if starts is None:
            try:
                result = find_starts(space, None if store is None else fits, all_fit=all_fit)
            except UnsupportedError:
                masters = buffer.states[MASTER][0]
                if are_remainders(store, masters):
                    raise remainders_error(key=_global_name(params[0]), rank=file.folder) from None
                raise
            self.notes.extend(result.notes)
            starts = result.starts
        for param, start in zip(params, starts, strict=True):
            if start is None:
                self.untrained.add(_global_name(param))
                continue
            for state in buffer.states:
                part = _part(buffer, state, start, param.array)
                assert part is not None, "no layout has a parameter in two buckets"
                yield ParamState(param, state, part)


def _global_name(param: Param) -> str:
    """Return the parameter's global name; the first expert's if it holds several experts."""
    return param.chunk.global_names(param.name)[0][1]


def _part(buffer: Buffer, state: str, start: int, weight: StoredArray) -> StoredArray | None:
    """Return a parameter's part of a state, or None if it spans several arrays."""
    array, at = buffer.place_of(state, start)
    if at + prod(weight.shape) > array.shape[0]:
        return None
    return narrow_array(array, at, weight.shape)


def _check_covered(
    files: Sequence[RankFile],
    states: Sequence[ParamState],
    facts: ModelFacts,
    rules: Rules,
    report: Report,
    *,
    untrained: Set[str],
) -> None:
    """Report the ranks with parameters whose optimizer states are in no file."""
    etp = facts.topology.expert_tp

    # Data parallel ranks hold the same shard; only one of them has its states.
    def shard(param: Param) -> tuple[object, ...]:
        rank = param.chunk.rank
        if is_distributed_expert(param.name, facts.topology, rules):
            return (param.chunk.where, param.name, rank.tp % etp, rank.ep)
        return (param.chunk.where, param.name, rank.tp)

    # Every shard has master weights, whatever its other states.
    covered = {shard(state.param) for state in states if state.state == MASTER}
    for file in files:
        lost = [
            param
            for param in file.params
            if shard(param) not in covered
            and rules.is_param(_global_name(param))
            and _global_name(param) not in untrained
        ]
        if lost:
            more = f" or of {len(lost) - 1} more" if len(lost) > 1 else ""
            error = MissingShardError(
                f"no distrib_optim.pt contains the optimizer state of this parameter{more}",
                key=lost[0].name,
                rank=file.folder,
                hint="copy the checkpoint again, with all of its files, or drop the optimizer with "
                "--no-optim",
                rule="optim.missing",
            )
            report(error)
