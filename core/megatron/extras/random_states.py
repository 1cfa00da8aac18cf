"""Treatment of random states when the layout changes.

Megatron ranks draw random numbers from streams. Data parallel ranks share a stream, tensor and
pipeline parallel ranks do not, and ranks that cut or distribute experts have one more
(``expert-parallel-rng``, seeded by the EP and ETP ranks). So a state is kept for the rank with the
same TP, PP, EP and ETP rank if the TP and PP sizes are the same::

    TP2 PP2        → TP2 PP2 VPP2    kept: the same ranks, with more chunks
    TP2 PP1 EP4    → TP2 PP1 EP2     kept: EP ranks 0 and 1 have states
    TP2 PP1 EP2    → TP2 PP1 EP4     dropped: EP ranks 2 and 3 have none
    TP2 PP2        → TP4 PP1         dropped: Megatron needs --no-load-rng

torch_dist keeps the states together with the sizes in its arguments: Megatron loads them only at
those sizes. Their keys are ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, with the states of the first
data parallel rank; with expert parallelism, Megatron-Bridge adds the data parallel rank.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``get_rng_state``, ``load_checkpoint``,
``core/tensor_parallel/random.py`` ``model_parallel_cuda_manual_seed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.removal import remove_entries, without_unused_tensors
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import RNG, unwrap_shard
from core.megatron.extras.nested_dicts import drop_versions
from core.megatron.extras.sharded_objects import sharded_object
from core.megatron.model.topology import Rank, Topology
from core.values import dataclass

WITHOUT = "start Megatron with --no-load-rng"
_HINT = f"use --rng drop, and {WITHOUT}"


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of a run.

    Args:
        topology: parallel sizes of the run.
        by_rank: rank → the entry ``rng_state`` of its file.
        is_known: the states could be read and assigned to ranks.
        others: keys of the states of data parallel ranks that have the stream of another.
    """

    topology: Topology
    by_rank: Mapping[Rank, object]
    is_known: bool = True
    others: tuple[str, ...] = ()

    def reason_to_drop(self, topology: Topology) -> str | None:
        """Return the reason why some rank at other sizes has no state; None if each has one."""
        saved = self.topology
        if (saved.tp, saved.pp) != (topology.tp, topology.pp):
            return f"saved with {saved}, not {topology}"
        if not self.is_known:
            return "stored in an unrecognized class or layout"
        missing = next((rank for rank in topology.ranks() if rank not in self.by_rank), None)
        if missing is None:
            return None
        rank_name = _name_rank(missing, has_experts=topology.ep > 1 or saved.ep > 1)
        return f"saved with {saved}, without a state for {rank_name}"

    def lost_at(self, topology: Topology) -> tuple[Dropped, ...]:
        """Return the record of the states that other sizes with the same TP and PP do not keep."""
        ranks = set(topology.ranks())
        absent = (
            f"{RNG} of {_name_rank(rank, has_experts=True)}"
            for rank in self.by_rank
            if rank not in ranks
        )
        return (
            *dropped_together(absent, "random states of ranks that the destination does not have"),
            *dropped_together(
                self.others, "rank files have one random state for all data parallel ranks"
            ),
        )


def _name_rank(rank: Rank, *, has_experts: bool) -> str:
    """Return the coordinates of a rank in words."""
    name = f"TP rank {rank.tp}, PP rank {rank.pp}"
    return f"{name}, EP rank {rank.ep}, ETP rank {rank.etp}" if has_experts else name


def random_states(catalog: Catalog, own: Topology) -> RandomStates | None:
    """Return the random states of the global form, or None if it has none.

    Args:
        own: parallel sizes of the run that saved.
    """
    model = catalog.facet(MegatronModel)
    if model is not None and model.rng_states:
        return RandomStates(own, model.rng_states)
    states = list(filter(_is_rng_key, catalog.objects))
    if not states:
        return None

    # Get the grid of ranks from the keys: (PP, TP), or (PP, TP, DP) from Megatron-Bridge.
    shards = {key: sharded_object(key) for key in states}
    grids = {shard[2] for shard in shards.values() if shard is not None}
    if len(grids) != 1 or len(grid := grids.pop()) not in (2, 3):
        return RandomStates(own, {}, is_known=False)
    pp, tp = grid[:2]
    sizes = own if (tp, pp) == (own.tp, own.pp) else Topology(tp=tp, pp=pp)

    # Assign the states to ranks. TP ranks vary faster than DP ranks; of DP ranks with the same
    # stream, the first counts.
    by_rank: dict[Rank, object] = {}
    others: list[str] = []
    for key, shard in shards.items():
        item = catalog.objects[key]
        if shard is None or item.raw_key is not None:
            return RandomStates(sizes, {}, is_known=False)
        pp_rank, tp_rank, *dp_rank = shard[1]
        rank = sizes.rank_of(tp_rank + tp * sum(dp_rank), pp_rank)
        if rank in by_rank:
            others.append(key)
        by_rank.setdefault(rank, unwrap_shard(item.value))
    return RandomStates(sizes, by_rank, others=tuple(others))


def _is_rng_key(key: str) -> bool:
    """Return True for torch_dist's key of a random state."""
    return key.startswith(f"{RNG}/")


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The random states in a destination of rank files.

    Args:
        by_rank: rank → its state; {} if the states are dropped.
        dropped: the record of dropped states.
    """

    by_rank: Mapping[Rank, object]
    dropped: tuple[Dropped, ...] = ()


def kept_states(
    catalog: Catalog, own: Topology, topology: Topology, *, rng: str | None
) -> KeptStates:
    """Return the random state of every rank in a destination.

    Args:
        own: parallel sizes of the run that saved.
        topology: parallel sizes of the destination.
        rng: ``keep`` refuses to drop the states; None drops them if they cannot be kept.

    Raises:
        UnsupportedError: ``rng`` is ``keep``, and the states cannot be kept.
    """
    states = random_states(catalog, own)
    if states is None:
        return KeptStates({})
    reason = states.reason_to_drop(topology)
    if reason is None:
        return KeptStates(states.by_rank, states.lost_at(topology))
    if rng == "keep":
        raise UnsupportedError(
            f"the random states cannot be kept, because they were {reason}", hint=_HINT
        )
    return KeptStates({}, (Dropped((RNG,), f"{reason}; {WITHOUT}"),))


def with_rng(catalog: Catalog, rng: str | None, *, has_place: bool, has_ranks: bool) -> Catalog:
    """Return the global form without the random states that ``--rng`` or the destination drops.

    A destination without ranks does not store the versions of modules either.

    Args:
        rng: ``keep``, ``drop`` or None.
        has_place: the destination can store random states.
        has_ranks: the destination stores the states of all ranks, not only one per (PP, TP).

    Raises:
        UsageError: ``rng`` is ``keep``, but there are no random states, or the destination cannot
            store them.
    """
    states = set(filter(_is_rng_key, catalog.objects))
    if rng == "keep" and not (states and has_place):
        reason = (
            "the destination cannot store them"
            if states
            else ("the checkpoint has no random states")
        )
        raise UsageError(f"the random states cannot be kept, because {reason}", hint="remove --rng")

    removed = states if rng == "drop" else set()
    catalog = catalog if has_ranks else drop_versions(catalog)
    model = catalog.facet(MegatronModel) or MegatronModel()
    if not removed and (has_ranks or not model.rng_states):
        return catalog

    result = catalog.with_facet(replace(model, rng_states={})) if model.rng_states else catalog
    result = without_unused_tensors(result, catalog)
    if removed:
        result = remove_entries(result, removed)
        return replace(result, dropped=(*catalog.dropped, Dropped((RNG,), WITHOUT)))
    # An object has the state of the first rank of each (PP, TP).
    others: list[str] = []
    kept: set[tuple[int, int]] = set()
    for rank in model.rng_states:
        if (rank.tp, rank.pp) in kept:
            others.append(f"{RNG} of {_name_rank(rank, has_experts=True)}")
        kept.add((rank.tp, rank.pp))
    reason = "only one random state per TP and PP rank is kept"
    return replace(result, dropped=(*catalog.dropped, *dropped_together(others, reason)))
