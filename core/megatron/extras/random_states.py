"""Random states when the layout changes.

Every rank of Megatron draws from streams of its own: data parallel ranks share them, tensor and pipeline parallel ranks
do not, and those that cut or distribute experts have one more (``expert-parallel-rng``, seeded by the ranks of EP and
ETP). So a state goes to the rank with the same TP, PP, EP and ETP rank at the same TP and PP sizes, or nowhere::

    TP2 PP2        → TP2 PP2 VPP2    kept: the same ranks, with more chunks
    TP2 PP1 EP4    → TP2 PP1 EP2     kept: EP ranks 0 and 1 were there
    TP2 PP1 EP2    → TP2 PP1 EP4     left out: EP ranks 2 and 3 were not
    TP2 PP2        → TP4 PP1         left out: Megatron needs --no-load-rng

torch_dist keeps the states with the sizes in its arguments: Megatron asks for them only at those sizes. There they have
the keys ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, those of the first data parallel rank; Megatron-Bridge adds the data
parallel rank where there is expert parallelism.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``get_rng_state``, ``load_checkpoint``,
``core/tensor_parallel/random.py`` ``model_parallel_cuda_manual_seed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.facets import MegatronModel
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import RNG, common_of, sharded_object
from core.megatron.model.topology import Rank, Topology
from core.pickle.inert import TensorLeaf, walk

WITHOUT = "start Megatron with --no-load-rng"
_HINT = f"say --rng drop, and {WITHOUT}"


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of a run.

    Args:
        topology: its sizes.
        by_rank: rank → the entry ``rng_state`` of its file.
        is_known: whether they could be told apart and read.
    """

    topology: Topology
    by_rank: Mapping[Rank, object]
    is_known: bool = True

    def why_not(self, topology: Topology) -> str | None:
        """Why ranks at other sizes have no states of their own, or None if all have."""
        own = self.topology
        if (own.tp, own.pp) != (topology.tp, topology.pp):
            return f"of {own}, not {topology}"
        if not self.is_known:
            return "of a class or an arrangement that is not known"
        missing = [rank for rank in topology.ranks() if rank not in self.by_rank]
        if missing:
            one = missing[0]
            where = f"TP rank {one.tp}, PP rank {one.pp}"
            where += f", EP rank {one.ep}, ETP rank {one.etp}" if topology.ep > 1 or own.ep > 1 else ""
            return f"of {own}, which has none for {where}"
        return None


def random_states(catalog: Catalog, own: Topology) -> RandomStates | None:
    """The random states of the global form, or None if there are none.

    Args:
        own: sizes of the run that saved.
    """
    model = catalog.facet(MegatronModel)
    if model is not None and model.rng_states:
        return RandomStates(own, model.rng_states)
    states = {key: item for key, item in catalog.objects.items() if key.startswith(f"{RNG}/")}
    if not states:
        return None
    grids = {found[2] for key in states if (found := sharded_object(key)) is not None}
    if len(grids) != 1 or len(grid := grids.pop()) not in (2, 3):
        return RandomStates(own, {}, is_known=False)
    pp, tp = grid[:2]
    sizes = own if (tp, pp) == (own.tp, own.pp) else Topology(tp=tp, pp=pp)
    by_rank: dict[Rank, object] = {}
    for key, item in states.items():
        found = sharded_object(key)
        if found is None or item.raw_key is not None:
            return RandomStates(sizes, {}, is_known=False)
        pp_rank, tp_rank, *dp_rank = found[1]
        by_rank.setdefault(sizes.rank_of(tp_rank + tp * sum(dp_rank), pp_rank), _unwrapped(item))
    return RandomStates(sizes, by_rank)


def kept_states(
    catalog: Catalog, own: Topology, topology: Topology, *, rng: str | None, dropped: list[str]
) -> Mapping[Rank, object]:
    """What every rank of the destination gets; {} with a note where it cannot be known.

    Args:
        own: sizes of the run that saved.
        rng: ``keep`` refuses to leave them out; None leaves them out where they cannot be kept.

    Raises:
        UnsupportedError: ``rng`` is ``keep``, and they cannot be kept.
    """
    states = random_states(catalog, own)
    if states is None:
        return {}
    why = states.why_not(topology)
    if why is None:
        return states.by_rank
    if rng == "keep":
        raise UnsupportedError(f"the random states cannot be kept: they are {why}", hint=_HINT)
    dropped.append(f"{RNG} ({why}; {WITHOUT})")
    return {}


def with_rng(catalog: Catalog, rng: str | None, *, has_place: bool, has_ranks: bool) -> Catalog:
    """The global form as ``--rng`` and the destination want it.

    Args:
        rng: ``keep``, ``drop`` or None.
        has_place: whether the destination keeps random states of ranks.
        has_ranks: whether it keeps those of every rank, and not only one for each (TP, PP).

    Raises:
        UsageError: ``keep``, and there is nothing to keep, or no place for it.
    """
    states = [key for key in catalog.objects if key.startswith(f"{RNG}/")]
    if rng == "keep" and not (states and has_place):
        what = "the destination has no place for them" if states else "the checkpoint has none"
        raise UsageError(f"the random states cannot be kept: {what}", hint="leave --rng out")
    gone = set(states) if rng == "drop" else set()
    model = catalog.facet(MegatronModel) or MegatronModel()
    if not gone and (has_ranks or not model.rng_states):
        return catalog
    objects = {key: item for key, item in catalog.objects.items() if key not in gone}
    used = {leaf for item in objects.values() for leaf in _keys(item)}
    used |= {leaf.key for leaf in walk(common_of(catalog)) if isinstance(leaf, TensorLeaf)}
    unused = {leaf.key for value in model.rng_states.values() for leaf in walk(value) if isinstance(leaf, TensorLeaf)}
    unused |= {leaf for key in gone for leaf in _keys(catalog.objects[key])}
    hidden = {key: meta for key, meta in catalog.hidden.items() if key in used or key not in unused}
    dropped = (*catalog.dropped, f"{RNG} ({WITHOUT})") if gone else catalog.dropped
    result = replace(catalog, objects=objects, hidden=hidden, dropped=dropped)
    return result.with_facet(replace(model, rng_states={})) if model.rng_states else result


def _keys(item: StoredObject) -> set[str]:
    """Keys of the hidden tensors of an object."""
    inside = {leaf.key for leaf in walk(item.value) if isinstance(leaf, TensorLeaf)}
    return inside if item.raw_key is None else inside | {item.raw_key}


def _unwrapped(item: StoredObject) -> object:
    """The value of a ShardedObject, which torch_dist keeps in a list of one."""
    value = item.value
    return value[0] if isinstance(value, list) and len(value) == 1 else value
