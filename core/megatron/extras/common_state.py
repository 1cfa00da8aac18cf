"""The entries of a Megatron checkpoint other than the model, and what becomes of them when the
layout changes.

=====================================
=================================================================================
 entry                                  policy
=====================================
=================================================================================
 ``args``                               copied, sizes updated (``core.megatron.model.args``); all ranks agree on the
                                        fields of the layout
 ``checkpoint_version``                 kept; below 2.0 the QKV rows of megatron.legacy models are put in order, and it
                                        becomes 3.0 (``core.megatron.placement.qkv_order``)
 ``iteration`` (older ``total_iters``)  kept
 ``opt_param_scheduler``                kept; equal on all ranks
 ``num_floating_point_operations…``     kept
 ``rng_state``                          one per rank: kept in torch_dist, and for ranks that were there before;
                                        otherwise left out, with a note
                                        (``core.megatron.extras.random_states``)
 ``rerun_state_machine``                left out of rank files, with a note (Megatron ignores it unless no size changed)
 ``content_metadata``                   torch_dist only
 ``optimizer``, ``distrib_optim.pt``    ``core.catalog.optimizer_keys``; left out on request
 anything else                          kept if it is equal on all ranks, otherwise left out, with a note
=====================================
=================================================================================

Random states have the keys that torch_dist gives them, ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``,
wherever they came from.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``generate_state_dict``,
    ``load_checkpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.stored import Coords, PlannedArray
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.topology import Rank, Topology
from core.pickle.inert import (
    NO_STATE,
    Global,
    Inert,
    TensorLeaf,
    ValueCounter,
    as_mapping,
    attributes,
    walk,
)
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
"""Entries on which ranks of one step agree."""
_CHUNK = re.compile(r"model(0|[1-9]\d*)?$")
_SHARDED = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)$")


def is_chunk(name: object) -> bool:
    """Return whether a top-level key names a model chunk: ``model``, ``model0``, ``model1`` …"""
    return isinstance(name, str) and _CHUNK.match(name) is not None


def rng_key(tp_rank: int, pp_rank: int, *, tp: int, pp: int) -> str:
    """Return the key under which torch_dist keeps the random state of a rank."""
    return f"{RNG}/shard_{pp_rank}.{tp_rank}_{pp}.{tp}"


def sharded_object(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Split the key of a ShardedObject into name, offset and shape; None for other keys."""
    match = _SHARDED.match(key)
    if match is None:
        return None
    return match[1], tuple(map(int, match[2].split("."))), tuple(map(int, match[3].split(".")))


def check_version(common: Mapping[object, object], *, has_old_names: bool = False) -> float:
    """Return the ``checkpoint_version`` of a checkpoint, and raise if it is too old to be read.

    Args:
        has_old_names: the model has the names of ``megatron.legacy``;
            ``core.megatron.placement.qkv_order`` puts its rows in order.

    Raises:
        UnsupportedError: the version is below 2.0, or absent, which means 0, and the names are not
            old ones.
        CorruptError: the version is not a number.
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
    """Return the training iteration, or None if the common state has none."""
    for name in ("iteration", "total_iters"):
        value = common.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def same(first: object, second: object) -> bool:
    """Return whether two inert trees are equal.

    Tensors are equal if their keys are, without the part before the first colon (the rank
    directory); their content is for the engine to compare. Shared and cyclic parts are safe.
    """
    pairs = [(first, second)]
    compared: set[tuple[int, int]] = set()
    while pairs:
        a, b = pairs.pop()
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        if not isinstance(a, (dict, list, tuple, Inert)):
            if not _are_same_leaves(a, b):
                return False
        elif (id(a), id(b)) not in compared:
            compared.add((id(a), id(b)))
            parts = _paired_parts(a, b)
            if parts is None:
                return False
            pairs += parts
    return True


def _paired_parts(a: object, b: object) -> list[tuple[object, object]] | None:
    """Return the parts of two containers of one type that must be equal; None if the containers
    differ already.
    """
    if isinstance(a, Inert):
        assert isinstance(b, Inert)
        if a.how != b.how or (a.state is NO_STATE) != (b.state is NO_STATE):
            return None

        # An object is equal to another one of the same origin, arguments and content.
        parts: list[tuple[object, object]] = [
            (a.fn, b.fn),
            (a.args, b.args),
            (a.kwargs, b.kwargs),
            (a.items, b.items),
            (a.entries, b.entries),
        ]
        return parts if a.state is NO_STATE else [*parts, (a.state, b.state)]
    assert isinstance(a, (dict, list, tuple)) and isinstance(b, (dict, list, tuple))
    if len(a) != len(b):
        return None
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return [*zip(a, b, strict=True), *zip(a.values(), b.values(), strict=True)]
    return list(zip(a, b, strict=True))


def _are_same_leaves(a: object, b: object) -> bool:
    if isinstance(a, TensorLeaf):
        assert isinstance(b, TensorLeaf)
        return a.key.partition(":")[2] == b.key.partition(":")[2]
    is_nan = isinstance(a, float) and isinstance(b, float) and a != a and b != b
    return a == b or is_nan


def renamed_leaves(value: object, new_key: Callable[[str, str], str]) -> object:
    """Return a copy of an entry's value whose tensors have other keys; what is shared stays shared.

    Args:
        value: an inert tree with ``TensorLeaf``s.
        new_key: (path within the value, dot-joined; old key) → new key.

    Raises:
        CorruptError: nested deeper than ``MAX_DEPTH``, which includes cycles.
    """
    return _LeafRenamer(new_key).copy(value, ())


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """An entry of a rank's file that is to be written.

    Args:
        value: inert tree of the entry; every tensor in it names one of the arrays.
        arrays: (key of the source, array that the tensor goes to), in the order of the tree.
    """

    value: object
    arrays: Sequence[tuple[str, PlannedArray]]


def plan_entry(
    catalog: Catalog,
    value: object,
    name: str,
    coords: Coords,
    *,
    weights: ValueCounter | None = None,
) -> PlannedEntry:
    """Plan an entry of a rank's file: its tensors become arrays of that file.

    Args:
        catalog: has the tensors.
        value: an inert tree with ``TensorLeaf``s.
        name: what the arrays' names begin with.
        coords: coordinates of the rank.
        weights: remembered sizes of what several ranks' entries share: a part without tensors is
            then not copied.

    Raises:
        CorruptError: as for ``renamed_leaves``.
    """
    arrays: list[tuple[str, PlannedArray]] = []

    def new_key(path: str, old: str) -> str:
        array_name = f"{name}.{path}" if path else name
        meta = catalog.meta(old)
        arrays.append((old, PlannedArray(array_name, meta.dtype, meta.shape, coords=coords)))
        return array_name

    return PlannedEntry(_LeafRenamer(new_key, weights).copy(value, ()), arrays)


@dataclass(slots=True)
class _LeafRenamer:
    """Copies inert trees, giving their tensors new keys.

    Args:
        new_key: (path, old key) → new key.
        weights: what tells parts without tensors, which are not copied; None copies everything.
        copies: id of a container → its copy, so that what is shared stays shared.
    """

    new_key: Callable[[str, str], str]
    weights: ValueCounter | None = None
    copies: dict[int, object] = field(default_factory=dict)

    def copy(self, node: object, path: tuple[object, ...]) -> object:
        """Return the copy of a node at a path of the tree."""
        if not isinstance(node, (dict, list, tuple, Inert, TensorLeaf)):
            return node
        if self.weights is not None and self.weights.of(node):
            return node
        if len(path) > MAX_DEPTH:
            raise CorruptError(
                f"objects are nested deeper than {MAX_DEPTH} levels", key=join_path(path[:8])
            )
        if isinstance(node, TensorLeaf):
            return replace(node, key=self.new_key(join_path(path), node.key))
        if id(node) not in self.copies:
            self.copies[id(node)] = self._copy_container(node, path)
        return self.copies[id(node)]

    def _copy_container(self, node: object, path: tuple[object, ...]) -> object:
        """Return a copy of a container whose tensors have new keys."""
        if isinstance(node, dict):
            return {key: self.copy(item, (*path, key)) for key, item in node.items()}
        if isinstance(node, list):
            return [self.copy(item, (*path, index)) for index, item in enumerate(node)]
        if isinstance(node, tuple):
            return tuple(self.copy(item, (*path, index)) for index, item in enumerate(node))
        assert isinstance(node, Inert)
        copy = Inert(node.how, node.fn, node.args, kwargs=node.kwargs)
        copy.args = tuple(
            self.copy(item, (*path, f"args.{index}")) for index, item in enumerate(node.args)
        )
        copy.state = self.copy(node.state, (*path, "state"))
        copy.items = [self.copy(item, (*path, index)) for index, item in enumerate(node.items)]
        copy.entries = [(key, self.copy(item, (*path, key))) for key, item in node.entries]
        return copy


def is_ordered(container: object) -> bool:
    """Return whether a state dict is an OrderedDict."""
    return isinstance(container, Inert) and container.fn == Global("collections", "OrderedDict")


def module_versions(container: object) -> dict[str, object]:
    """Return the ``_metadata`` of a state dict (module name → what torch notes about it); {}
    without one.
    """
    metadata = as_mapping((attributes(container) or {}).get("_metadata")) or {}
    return {name: value for name, value in metadata.items() if isinstance(name, str)}


def note_dropped_optimizer(kind: str, *, optim: str) -> str:
    """Return the note that optimizer state is left out.

    Args:
        kind: the form of the state, in words for people.
        optim: what the user asked for, ``refuse`` or ``drop``.

    Raises:
        UnsupportedError: ``optim`` is ``refuse``.
    """
    if optim == "refuse":
        raise UnsupportedError(
            f"the destination cannot store this optimizer state ({kind})",
            hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
        )
    return f"optimizer ({kind}; start Megatron with --no-load-optim)"


def common_of(catalog: Catalog) -> Mapping[object, object]:
    """Return the top-level entries of a checkpoint other than its model."""
    return catalog.common or {}


@dataclass(frozen=True, slots=True)
class RankExtras:
    """The content of rank files besides the model and the optimizer.

    Args:
        common: entries that all ranks share.
        objects: random states under torch_dist's keys: one for each (TP, PP).
        rng_states: the random states of every rank.
        dropped: entries that are left out, each with the reason.
    """

    common: dict[object, object]
    objects: dict[str, StoredObject]
    rng_states: dict[Rank, object]
    dropped: tuple[str, ...]


def read_rank_extras(ranks: Mapping[Coords, tuple[str, object]], topology: Topology) -> RankExtras:
    """Read what rank files hold besides the model and the optimizer.

    Args:
        ranks: coordinates → (directory, content of the file).
        topology: parallel sizes of these ranks.

    Raises:
        CorruptError: the ranks are not of one iteration.
    """
    # Keep the entries on which all ranks agree.
    roots = [(folder, as_mapping(root) or {}) for folder, root in ranks.values()]
    common: dict[object, object] = {}
    dropped: list[str] = []
    for name in dict.fromkeys(name for _, root in roots for name in root):
        if is_chunk(name) or name in (OPTIMIZER, RNG):
            continue
        reason = None if name == "args" else _reason_to_drop(name, roots)
        if reason is None:
            common[name] = roots[0][1].get(name)
        else:
            dropped.append(f"{name} ({reason})")

    # torch_dist has one random state for each (PP, TP): that of the first rank.
    objects: dict[str, StoredObject] = {}
    states: dict[Rank, object] = {}
    for coords, (_, root) in zip(ranks, roots, strict=True):
        if RNG in root:
            rank = topology.rank_at(coords)
            states[rank] = root[RNG]
            key = rng_key(rank.tp, rank.pp, tp=topology.tp, pp=topology.pp)
            objects.setdefault(key, StoredObject(key, value=[root[RNG]], coords=coords))
    return RankExtras(common, objects, states, tuple(dropped))


def _reason_to_drop(
    name: object, roots: Sequence[tuple[str, Mapping[object, object]]]
) -> str | None:
    """Return why an entry cannot be kept for all ranks, or None if it can.

    Raises:
        CorruptError: the entry tells the step of the run, and ranks disagree about it.
    """
    first_folder, first_root = roots[0]
    differing = next(
        (
            folder
            for folder, root in roots
            if name not in root or not same(root[name], first_root.get(name))
        ),
        None,
    )
    if differing is not None:
        if name in OF_THE_RUN:
            raise CorruptError(
                f"{name} differs from that in {first_folder}",
                rank=differing,
                hint="the rank directories are not of one step",
            )
        return "not the same on all ranks"
    has_tensors = any(isinstance(leaf, TensorLeaf) for leaf in walk(first_root.get(name)))
    return "holds tensors, one set a rank" if has_tensors and len(roots) > 1 else None
