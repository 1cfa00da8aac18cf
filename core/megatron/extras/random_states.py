"""Random states when the layout changes.

Megatron ranks draw random numbers from streams: data parallel ranks share theirs, tensor and
pipeline parallel ranks do not, and ranks that cut or distribute experts have one more
(``expert-parallel-rng``, seeded by the ranks of EP and
ETP). So a state goes to the rank with the same TP, PP, EP and ETP rank at the same TP and PP sizes, or nowhere::

    TP2 PP2        → TP2 PP2 VPP2    kept: the same ranks, with more chunks
    TP2 PP1 EP4    → TP2 PP1 EP2     kept: EP ranks 0 and 1 were there
    TP2 PP1 EP2    → TP2 PP1 EP4     left out: EP ranks 2 and 3 were not
    TP2 PP2        → TP4 PP1         left out: Megatron needs --no-load-rng

torch_dist keeps the states with the sizes in its arguments: Megatron asks for them only at those
sizes. There they have the keys ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, those of the first data
parallel rank; Megatron-Bridge adds the data parallel rank where there is expert parallelism.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``get_rng_state``, ``load_checkpoint``,
``core/tensor_parallel/random.py`` ``model_parallel_cuda_manual_seed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.facets import MegatronModel
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import RNG, common_of, sharded_object
from core.megatron.model.topology import Rank, Topology
from core.pickle.inert import TensorLeaf, walk

WITHOUT = "start Megatron with --no-load-rng"
_HINT = f"use --rng drop, and {WITHOUT}"


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of a run.

    Args:
        topology: parallel sizes of the run.
        by_rank: rank → the entry ``rng_state`` of its file.
        is_known: the states could be told apart and read.
    """

    topology: Topology
    by_rank: Mapping[Rank, object]
    is_known: bool = True

    def reason_to_drop(self, topology: Topology) -> str | None:
        """Return why some rank at other sizes has no state of its own; None if each has one."""
        own = self.topology
        if (own.tp, own.pp) != (topology.tp, topology.pp):
            return f"saved with {own}, not {topology}"
        if not self.is_known:
            return "their class or layout is not recognized"
        missing = next((rank for rank in topology.ranks() if rank not in self.by_rank), None)
        if missing is None:
            return None
        place = f"TP rank {missing.tp}, PP rank {missing.pp}"
        place += (
            f", EP rank {missing.ep}, ETP rank {missing.etp}"
            if topology.ep > 1 or own.ep > 1
            else ""
        )
        return f"saved with {own}, without any for {place}"


def random_states(catalog: Catalog, own: Topology) -> RandomStates | None:
    """Return the random states of the global form, or None if it has none.

    Args:
        own: parallel sizes of the run that saved.
    """
    model = catalog.facet(MegatronModel)
    if model is not None and model.rng_states:
        return RandomStates(own, model.rng_states)
    states = {key: item for key, item in catalog.objects.items() if key.startswith(f"{RNG}/")}
    if not states:
        return None

    # The keys tell the grid of ranks: (PP, TP), or (PP, TP, DP) by Megatron-Bridge.
    shards = {key: sharded_object(key) for key in states}
    grids = {shard[2] for shard in shards.values() if shard is not None}
    if len(grids) != 1 or len(grid := grids.pop()) not in (2, 3):
        return RandomStates(own, {}, is_known=False)
    pp, tp = grid[:2]
    sizes = own if (tp, pp) == (own.tp, own.pp) else Topology(tp=tp, pp=pp)

    by_rank: dict[Rank, object] = {}
    for key, item in states.items():
        shard = shards[key]
        if shard is None or item.raw_key is not None:
            return RandomStates(sizes, {}, is_known=False)
        pp_rank, tp_rank, *dp_rank = shard[1]
        value = item.value  # torch_dist keeps it in a list of one
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        by_rank.setdefault(sizes.rank_of(tp_rank + tp * sum(dp_rank), pp_rank), value)
    return RandomStates(sizes, by_rank)


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The random states at a destination of rank files.

    Args:
        by_rank: rank → its state; {} where the states are left out.
        dropped: the note that says so.
    """

    by_rank: Mapping[Rank, object]
    dropped: tuple[str, ...] = ()


def kept_states(
    catalog: Catalog, own: Topology, topology: Topology, *, rng: str | None
) -> KeptStates:
    """Return the random state of every rank of a destination.

    Args:
        own: parallel sizes of the run that saved.
        topology: parallel sizes of the destination.
        rng: ``keep`` refuses to leave the states out; None leaves them out where they cannot be
            kept.

    Raises:
        UnsupportedError: ``rng`` is ``keep``, and the states cannot be kept.
    """
    states = random_states(catalog, own)
    if states is None:
        return KeptStates({})
    reason = states.reason_to_drop(topology)
    if reason is None:
        return KeptStates(states.by_rank)
    if rng == "keep":
        raise UnsupportedError(f"the random states cannot be kept: {reason}", hint=_HINT)
    return KeptStates({}, (f"{RNG} ({reason}; {WITHOUT})",))


def with_rng(catalog: Catalog, rng: str | None, *, has_place: bool, has_ranks: bool) -> Catalog:
    """Return the global form with the random states that ``--rng`` and the destination want.

    Args:
        rng: ``keep``, ``drop`` or None.
        has_place: whether the destination keeps random states of ranks.
        has_ranks: whether it keeps those of every rank, and not only one for each (TP, PP).

    Raises:
        UsageError: ``rng`` is ``keep``, but there is nothing to keep, or the destination cannot
            store it.
    """
    states = [key for key in catalog.objects if key.startswith(f"{RNG}/")]
    if rng == "keep" and not (states and has_place):
        reason = "the destination cannot store them" if states else "the checkpoint has none"
        raise UsageError(f"the random states cannot be kept: {reason}", hint="leave --rng out")

    # Random states of single ranks have no place where only those of (TP, PP) do.
    removed = set(states) if rng == "drop" else set()
    model = catalog.facet(MegatronModel) or MegatronModel()
    if not removed and (has_ranks or not model.rng_states):
        return catalog

    objects = {key: item for key, item in catalog.objects.items() if key not in removed}
    result = replace(
        catalog,
        objects=objects,
        hidden=_needed_tensors(catalog, removed),
        dropped=(*catalog.dropped, f"{RNG} ({WITHOUT})") if removed else catalog.dropped,
    )
    return result.with_facet(replace(model, rng_states={})) if model.rng_states else result


def _needed_tensors(catalog: Catalog, removed: Collection[str]) -> dict[str, TensorMeta]:
    """Return the hidden tensors without those to which only removed objects, or states of ranks,
    refer.

    Args:
        removed: keys of the objects.
    """
    model = catalog.facet(MegatronModel) or MegatronModel()
    used = _tensor_keys([common_of(catalog)])
    unused = _tensor_keys(model.rng_states.values())
    for key, item in catalog.objects.items():
        keys = _tensor_keys([item.value]) | ({item.raw_key} if item.raw_key is not None else set())
        if key in removed:
            unused |= keys
        else:
            used |= keys
    return {key: meta for key, meta in catalog.hidden.items() if key in used or key not in unused}


def _tensor_keys(values: Iterable[object]) -> set[str]:
    return {leaf.key for value in values for leaf in walk(value) if isinstance(leaf, TensorLeaf)}
