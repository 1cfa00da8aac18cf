"""What stands beside the model in a Megatron checkpoint, and what becomes of it when the layout changes.

=====================================  =================================================================================
 entry                                  policy
=====================================  =================================================================================
 ``args``                               copied, sizes updated (``core.megatron.model.args``); layout fields agree on all
 ranks ``checkpoint_version``                 kept; below 2.0 the QKV rows of megatron.legacy models are put in order,
                                        and it becomes 3.0 (``core.megatron.placement.qkv_order``)
 ``iteration`` (older ``total_iters``)  kept
 ``opt_param_scheduler``                kept; equal on all ranks
 ``num_floating_point_operations…``     kept
 ``rng_state``                          one per rank: kept in torch_dist, and for ranks that were there before;
                                        otherwise left out, with a note (``core.megatron.extras.random_states``)
 ``rerun_state_machine``                left out of rank files, with a note (Megatron ignores it unless no size changed)
 ``content_metadata``                   torch_dist only
 ``optimizer``, ``distrib_optim.pt``    ``core.catalog.optimizer_keys``; left out on request
 anything else                          kept if it is equal on all ranks, otherwise left out, with a note
=====================================  =================================================================================

Random states have the keys that torch_dist gives them, ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, wherever they came
from.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``generate_state_dict``, ``load_checkpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.stored import Coords, PlannedArray
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.topology import Rank, Topology
from core.pickle.inert import NO_STATE, Global, Inert, TensorLeaf, ValueCounter, as_mapping, attributes, walk
from core.pickle.nesting import MAX_DEPTH, join_path

OPTIMIZER = "optimizer"
RNG = "rng_state"
RERUN = "rerun_state_machine"
CONTENT = "content_metadata"
EXTRA_STATE = "_extra_state"
OLDEST = 2
"""The ``checkpoint_version`` since which the rows of query, key and value have today's order."""
TOP_LEVEL = (
    *("args", "checkpoint_version", "iteration", "model", OPTIMIZER, "opt_param_scheduler", RNG),
    "num_floating_point_operations_so_far",
)
"""The usual entries of a rank file, in the order in which Megatron makes them."""

OF_THE_RUN = ("iteration", "checkpoint_version", "opt_param_scheduler")
"""Entries by which ranks tell that they are of one step."""
_CHUNK = re.compile(r"model(0|[1-9]\d*)?$")
_SHARDED = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)$")


def is_chunk(name: object) -> bool:
    """Whether a top-level key is a model chunk: ``model``, ``model0``, ``model1`` …"""
    return isinstance(name, str) and _CHUNK.match(name) is not None


def rng_key(tp_rank: int, pp_rank: int, *, tp: int, pp: int) -> str:
    """Key of a rank's random state."""
    return f"{RNG}/shard_{pp_rank}.{tp_rank}_{pp}.{tp}"


def sharded_object(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """(name, offset, shape) of a ShardedObject's key, or None."""
    match = _SHARDED.match(key)
    if match is None:
        return None
    return match[1], tuple(map(int, match[2].split("."))), tuple(map(int, match[3].split(".")))


def check_version(common: Mapping[object, object], *, has_old_names: bool = False) -> float:
    """The ``checkpoint_version`` of a checkpoint.

    Args:
        has_old_names: the model has the names of ``megatron.legacy``; ``core.megatron.placement.qkv_order`` puts its
            rows in order.

    Raises:
        UnsupportedError: below 2.0, or absent, which means 0, in another model.
        CorruptError: it is no number.
    """
    version = common.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise CorruptError(f"checkpoint_version is {version!r}, not a number")
    if version < OLDEST and not has_old_names:
        raise UnsupportedError(
            f"checkpoint_version is {version}: before 2.0 the rows of query, key and value had another order, and "
            "parameters other names",
            hint="load and save it once with a newer Megatron-LM",
        )
    return version


def iteration_of(common: Mapping[object, object]) -> int | None:
    """The training iteration, or None."""
    for name in ("iteration", "total_iters"):
        value = common.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def same(one: object, other: object) -> bool:
    """Whether two inert trees are equal.

    Tensors are equal if their keys are, without the part before the first colon (the rank directory); their content is
    for the engine to compare. Shared and cyclic parts are safe.
    """
    stack = [(one, other)]
    seen: set[tuple[int, int]] = set()
    while stack:
        a, b = stack.pop()
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        if isinstance(a, (dict, list, tuple, Inert)):
            if (id(a), id(b)) in seen:
                continue
            seen.add((id(a), id(b)))
        if isinstance(a, dict):
            assert isinstance(b, dict)
            if len(a) != len(b):
                return False
            for (key_a, value_a), (key_b, value_b) in zip(a.items(), b.items(), strict=True):
                stack += ((key_a, key_b), (value_a, value_b))
        elif isinstance(a, (list, tuple)):
            assert isinstance(b, (list, tuple))
            if len(a) != len(b):
                return False
            stack += zip(a, b, strict=True)
        elif isinstance(a, Inert):
            assert isinstance(b, Inert)
            if a.how != b.how or (a.state is NO_STATE) != (b.state is NO_STATE):
                return False
            stack += ((a.fn, b.fn), (a.args, b.args), (a.kwargs, b.kwargs), (a.items, b.items), (a.entries, b.entries))
            if a.state is not NO_STATE:
                stack.append((a.state, b.state))
        elif isinstance(a, TensorLeaf):
            assert isinstance(b, TensorLeaf)
            if a.key.partition(":")[2] != b.key.partition(":")[2]:
                return False
        elif a != b and not (isinstance(a, float) and isinstance(b, float) and a != a and b != b):
            return False
    return True


def renamed_leaves(value: object, new_key: Callable[[str, str], str]) -> object:
    """A copy of an entry's value whose tensors have other keys; what is shared stays shared.

    Args:
        value: an inert tree with ``TensorLeaf``s.
        new_key: (path within the value, dot-joined; old key) → new key.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    return _renamed(value, (), {}, new_key)


def with_arrays(
    catalog: Catalog,
    value: object,
    name: str,
    coords: Coords,
    beside: dict[str, list[PlannedArray]],
    *,
    weights: ValueCounter | None = None,
) -> object:
    """An entry of a rank's file whose tensors are arrays of that file.

    Args:
        catalog: has the tensors.
        value: an inert tree with ``TensorLeaf``s.
        name: what the arrays' names begin with.
        coords: the rank's.
        beside: key of the source → its arrays; they are added here.
        weights: of what several ranks' entries share: what holds no tensor is then not copied.

    Raises:
        CorruptError: as ``renamed_leaves``.
    """

    def new_key(path: str, old: str) -> str:
        made = f"{name}.{path}" if path else name
        meta = catalog.meta(old)
        beside.setdefault(old, []).append(PlannedArray(made, meta.dtype, meta.shape, coords=coords))
        return made

    return _renamed(value, (), {}, new_key, weights)


def _renamed(
    node: object,
    path: tuple[object, ...],
    made: dict[int, object],
    new_key: Callable[[str, str], str],
    weights: ValueCounter | None = None,
) -> object:
    if not isinstance(node, (dict, list, tuple, Inert, TensorLeaf)) or (weights is not None and weights.of(node)):
        return node
    if len(path) > MAX_DEPTH:
        raise CorruptError(f"objects are nested deeper than {MAX_DEPTH} levels", key=join_path(path[:8]))

    def below(item: object, name: object) -> object:
        return _renamed(item, (*path, name), made, new_key, weights)

    if isinstance(node, TensorLeaf):
        return replace(node, key=new_key(join_path(path), node.key))
    if id(node) not in made:
        if isinstance(node, dict):
            made[id(node)] = {key: below(item, key) for key, item in node.items()}
        elif isinstance(node, list):
            made[id(node)] = [below(item, index) for index, item in enumerate(node)]
        elif isinstance(node, tuple):
            made[id(node)] = tuple(below(item, index) for index, item in enumerate(node))
        else:
            copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
            copy.args = tuple(below(item, f"args.{index}") for index, item in enumerate(node.args))
            copy.state = below(node.state, "state")
            copy.items = [below(item, index) for index, item in enumerate(node.items)]
            copy.entries = [(key, below(item, key)) for key, item in node.entries]
            made[id(node)] = copy
    return made[id(node)]


def is_ordered(container: object) -> bool:
    """Whether a state dict is an OrderedDict."""
    return isinstance(container, Inert) and container.fn == Global("collections", "OrderedDict")


def module_versions(container: object) -> dict[str, object]:
    """The ``_metadata`` of a module's state dict (module name → what torch notes about it), or {}."""
    found = as_mapping((attributes(container) or {}).get("_metadata"))
    return {} if found is None else {name: value for name, value in found.items() if isinstance(name, str)}


def refuse_or_drop_optimizer(kind: str, *, optim: str, dropped: list[str]) -> None:
    """Leaves optimizer state out, saying so, or refuses.

    Args:
        kind: what form it has, for people.
        optim: ``refuse`` or ``drop``.

    Raises:
        UnsupportedError: ``optim`` is ``refuse``.
    """
    if optim == "refuse":
        raise UnsupportedError(
            f"the destination has no place for optimizer state ({kind})",
            hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
        )
    dropped.append(f"optimizer ({kind}; start Megatron with --no-load-optim)")


def common_of(catalog: Catalog) -> Mapping[object, object]:
    """The entries beside the model."""
    return catalog.common or {}


@dataclass(frozen=True, slots=True)
class Beside:
    """What stands beside the model in rank files.

    Args:
        common: entries that all ranks share.
        objects: random states under torch_dist's keys: one for each (TP, PP).
        rng_states: those of every rank.
    """

    common: dict[object, object]
    objects: dict[str, StoredObject]
    rng_states: dict[Rank, object]


def beside(ranks: Mapping[Coords, tuple[str, object]], topology: Topology, dropped: list[str]) -> Beside:
    """What stands beside the model in rank files.

    Args:
        ranks: coordinates → (directory, content of the file).
        topology: their sizes.
        dropped: what is left out is noted here.

    Raises:
        CorruptError: the ranks are not of one iteration.
    """
    head_dir, head_root = next(iter(ranks.values()))
    head = as_mapping(head_root) or {}
    roots = [(rank, as_mapping(root) or {}) for rank, root in ranks.values()]
    names = dict.fromkeys(name for _, root in roots for name in root)
    common: dict[object, object] = {}
    for name in names:
        if is_chunk(name) or name in (OPTIMIZER, RNG):
            continue
        if name == "args":
            common[name] = head.get(name)
            continue
        differing = next(
            (rank for rank, root in roots if name not in root or not same(root[name], head.get(name))), None
        )
        has_tensors = any(isinstance(leaf, TensorLeaf) for leaf in walk(head.get(name)))
        if name not in head or differing is not None or (len(roots) > 1 and has_tensors):
            if name in OF_THE_RUN and differing is not None:
                raise CorruptError(
                    f"{name} differs from that in {head_dir}",
                    rank=differing,
                    hint="the rank directories are not of one step",
                )
            why = "holds tensors, one set a rank" if differing is None else "not the same on all ranks"
            dropped.append(f"{name} ({why})")
            continue
        common[name] = head[name]
    objects: dict[str, StoredObject] = {}
    states: dict[Rank, object] = {}
    for coords, (_, rank_root) in ranks.items():
        own = as_mapping(rank_root) or {}
        if RNG in own:
            rank = topology.rank_at(coords)
            states[rank] = own[RNG]
            key = rng_key(rank.tp, rank.pp, tp=topology.tp, pp=topology.pp)
            objects.setdefault(key, StoredObject(key, value=[own[RNG]], coords=coords))
    return Beside(common, objects, states)
