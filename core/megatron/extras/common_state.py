"""Top-level entries of a Megatron checkpoint, and their treatment when the layout changes.

``args``
    Copied, with updated sizes (``core.megatron.model.args``); all ranks agree on the arguments of
    the layout.
``checkpoint_version``
    Kept. Below 2.0 the QKV rows of megatron.legacy models are put into today's order, and the
    version becomes 3.0 (``core.megatron.placement.qkv_order``).
``iteration`` (older ``total_iters``), ``num_floating_point_operations…``
    Kept.
``opt_param_scheduler``
    Kept; equal on all ranks.
``rng_state``
    One per rank: kept in torch_dist, and for ranks that existed before; otherwise dropped, with a
    note (``core.megatron.extras.random_states``).
``rerun_state_machine``
    Dropped from rank files, with a note: Megatron ignores it unless no size changed.
``content_metadata``
    In torch_dist only.
``optimizer``, ``distrib_optim.pt``
    ``core.engine.catalog.optimizer_keys``; dropped on request.
anything else
    Kept if it is equal on all ranks, otherwise dropped, with a note.

Random states have the keys that torch_dist gives them, ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``,
whatever the source.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``generate_state_dict``,
    ``load_checkpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.stored import Coords, PlannedArray
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.topology import Rank, Topology
from core.pickle.equality import are_same, describe_difference
from core.pickle.fields import FieldReader, int_or_none
from core.pickle.inert import (
    Global,
    Inert,
    ObjectLeaf,
    TensorLeaf,
    ValueCounter,
    as_mapping,
    attributes,
    walk,
)
from core.pickle.nesting import MAX_DEPTH, LeafEntry, join_path, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor
    from core.megatron.rules.rules import Rules

OPTIMIZER = "optimizer"
RNG = "rng_state"
RERUN = "rerun_state_machine"
OF_RANKS = "tied to the ranks that saved it; Megatron starts without it"
"""The reason for not carrying ``RERUN`` over."""
CONTENT = "content_metadata"
EXTRA_STATE = "_extra_state"
OLDEST = 2
"""The ``checkpoint_version`` since which the rows of query, key and value have today's order."""
TOP_LEVEL = (
    "args",
    "checkpoint_version",
    "iteration",
    "model",
    OPTIMIZER,
    "opt_param_scheduler",
    RNG,
    "num_floating_point_operations_so_far",
)
"""The usual entries of a rank file, in the order in which Megatron adds them."""
OF_THE_RUN = ("iteration", "checkpoint_version", "opt_param_scheduler")
"""Entries on which all ranks agree if they are of the same training step."""
_CHUNK = re.compile(r"model(0|[1-9]\d*)?$")


def is_chunk(name: object) -> bool:
    """Return whether a top-level key names a model chunk: ``model``, ``model0``, ``model1`` …"""
    return isinstance(name, str) and _CHUNK.match(name) is not None


def rng_key(tp_rank: int, pp_rank: int, *, tp: int, pp: int) -> str:
    """Return torch_dist's key of the random state of a (PP, TP) rank."""
    return f"{RNG}/shard_{pp_rank}.{tp_rank}_{pp}.{tp}"


def unwrap_shard(value: object) -> object:
    """Return the value of a ShardedObject, which torch_dist wraps in a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def get_checkpoint_version(
    common: Mapping[object, object], *, has_old_names: bool = False
) -> float:
    """Return the ``checkpoint_version`` of a checkpoint, and raise if it is too old to be read.

    Args:
        has_old_names: the model has the names of ``megatron.legacy``, so
            ``core.megatron.placement.qkv_order`` can put its rows into today's order.

    Raises:
        UnsupportedError: the version is below 2.0, and ``has_old_names`` is False.
        CorruptError: the version is not a number.
    """
    # The first checkpoints had no version; Megatron reads that as 0.
    version = common.get("checkpoint_version", 0)
    version = FieldReader().read_number(version, "checkpoint_version")
    if version < OLDEST and not has_old_names:
        raise UnsupportedError(
            f"checkpoint_version is {version}, but ckpt supports only 2.0 and later, because "
            "earlier versions order query, key and value rows differently and name parameters "
            "differently",
            hint="load the checkpoint with a newer Megatron-LM and save it again",
        )
    return version


def get_iteration(common: Mapping[object, object]) -> int | None:
    """Return the training iteration, or None if the common state has none."""
    numbers = (int_or_none(common.get(name)) for name in ("iteration", "total_iters"))
    return next((number for number in numbers if number is not None), None)


def renamed_leaves(value: object, name: str, note: Callable[[str, str], None]) -> object:
    """Return a copy of an entry's value whose tensors have new keys; shared parts stay shared.

    Args:
        value: an inert tree with ``TensorLeaf``s.
        name: beginning of the new keys, which the path within the value follows.
        note: called with (new key, old key) for every tensor.

    Raises:
        CorruptError: the value is nested deeper than ``MAX_DEPTH``, or contains itself.
    """
    return _LeafRenamer(name, note).copy(value, ())


def plan_entry(
    catalog: Catalog,
    value: object,
    name: str,
    coords: Coords,
    *,
    weights: ValueCounter | None = None,
) -> tuple[object, list[tuple[str, PlannedArray]]]:
    """Plan an entry of a rank's file: its tensors become arrays of that file.

    Args:
        catalog: catalog of the tensors.
        value: an inert tree with ``TensorLeaf``s.
        name: beginning of the arrays' names.
        coords: coordinates of the rank.
        weights: counter shared by the entries of several ranks; with it, parts without tensors are
            not copied. None copies everything.

    Returns:
        The inert tree of the entry, whose tensors are named by their arrays; (key of a tensor in
        the source, array in the file), in the order of the tree.

    Raises:
        CorruptError: the value is nested deeper than ``MAX_DEPTH``, or contains itself.
    """
    arrays: list[tuple[str, PlannedArray]] = []

    def add(array_name: str, old: str) -> None:
        tensor = catalog.tensor(old)
        arrays.append((old, PlannedArray(array_name, tensor.dtype, tensor.shape, coords=coords)))

    return _LeafRenamer(name, add, weights).copy(value, ()), arrays


@dataclass(slots=True)
class _LeafRenamer:
    """A copier of inert trees that gives their tensors new keys.

    Args:
        name: beginning of the new keys.
        note: called with (new key, old key) for every tensor.
        weights: identifies parts without tensors, which are not copied; None copies everything.
        copies: id of a container → its copy, so that shared parts stay shared.
    """

    name: str
    note: Callable[[str, str], None]
    weights: ValueCounter | None = None
    copies: dict[int, object] = field(default_factory=dict)

    def copy(self, node: object, path: tuple[object, ...]) -> object:
        """Copy the node at a path of the tree.

        Raises:
            CorruptError: the path is longer than ``MAX_DEPTH``.
        """
        if not isinstance(node, (dict, list, tuple, Inert, TensorLeaf)):
            return node
        if self.weights is not None and self.weights.of(node):
            return node
        if len(path) > MAX_DEPTH:
            raise CorruptError(
                f"objects are nested deeper than {MAX_DEPTH} levels", key=join_path(path[:8])
            )
        if isinstance(node, TensorLeaf):
            within = join_path(path)
            key = f"{self.name}.{within}" if within else self.name
            self.note(key, node.key)
            return replace(node, key=key)
        if id(node) not in self.copies:
            self.copies[id(node)] = self._copy_container(node, path)
        return self.copies[id(node)]

    def _copy_container(self, node: object, path: tuple[object, ...]) -> object:
        """Copy a container; an object's function and class stay as they are."""
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
    """Return the ``_metadata`` of a state dict: module name → entry with its version; or {}."""
    metadata = as_mapping((attributes(container) or {}).get("_metadata")) or {}
    return {name: value for name, value in metadata.items() if isinstance(name, str)}


def record_dropped_optimizer(kind: str, tensors: Iterable[Tensor], *, optim: str) -> Dropped:
    """Return the record that optimizer state is dropped.

    Args:
        kind: the form of the state, in words for people.
        tensors: those of the state.
        optim: the user's request, ``refuse`` or ``drop``.

    Raises:
        UnsupportedError: ``optim`` is ``refuse``.
    """
    if optim == "refuse":
        raise UnsupportedError(
            f"the destination cannot store this optimizer state ({kind})",
            hint="drop it with --no-optim; the weights are carried over exactly, but training "
            "continues with a fresh optimizer",
        )
    reason = f"{kind}; start Megatron with --no-load-optim"
    return Dropped((OPTIMIZER,), reason, tensors=tuple(tensors))


def get_common_state(catalog: Catalog) -> Mapping[object, object]:
    """Return the common state: the top-level entries of a checkpoint other than its model."""
    return catalog.common or {}


def is_megatron(catalog: Catalog, rules: Rules) -> bool:
    """Return whether a catalog of global tensors has Megatron's names and training arguments.

    Args:
        catalog: any catalog whose objects are loaded.
    """
    from core.megatron.rules.prefixes import list_prefixes

    if catalog.is_rank_local:
        return False
    beginnings = tuple(
        prefix + stack for prefix in list_prefixes(rules) for stack in rules.main_stacks
    )
    if not any(key.startswith(beginnings) for key in catalog.tensors):
        return False
    args = common_entries(catalog).get("args")
    fields = attributes(args) or as_mapping(args) or {}
    return "tensor_model_parallel_size" in fields


def common_entries(catalog: Catalog) -> dict[object, object]:
    """Return the top-level entries other than the model by name, ``args`` among them."""
    if catalog.common is not None:
        return dict(catalog.common)

    # Without a common state the entries are in a nested file, or objects of their own.
    entries = _skeleton_entries(catalog)
    for name, item in catalog.objects.items():
        if name in ("args", OPTIMIZER) and item.raw_key is None:
            entries[name] = item.value
    if catalog.args is not None:
        entries["args"] = catalog.args

    # Another program may have an entry of this name that is no set of training arguments.
    if attributes(entries.get("args")) is None and as_mapping(entries.get("args")) is None:
        entries.pop("args", None)
    return entries


def _skeleton_entries(catalog: Catalog) -> dict[object, object]:
    """Return the top-level entries of a nested file other than the model, with their objects."""

    def value_of(entry: LeafEntry) -> object:
        if isinstance(entry.leaf, ObjectLeaf):
            # An object that is not loaded stays a leaf.
            item = catalog.objects.get(entry.leaf.key)
            return entry.leaf if item is None or item.raw_key is not None else item.value
        return entry.leaf

    entries: dict[object, object] = {}
    for name, value in (as_mapping(catalog.skeleton) or {}).items():
        if is_chunk(name) or name == RNG or isinstance(value, TensorLeaf):
            continue
        container = as_mapping(map_leaves({"": value}, value_of))
        if container:
            entries[name] = container[""]
    return entries


@dataclass(frozen=True, slots=True)
class RankExtras:
    """The content of rank files other than the model and the optimizer.

    Args:
        common: entries that all ranks share.
        objects: random states under torch_dist's keys, one for each (PP, TP).
        rng_states: rank → random state.
        dropped: entries that are dropped, each with the reason.
    """

    common: dict[object, object]
    objects: dict[str, StoredObject]
    rng_states: dict[Rank, object]
    dropped: tuple[Dropped, ...]


def collect_rank_extras(
    ranks: Mapping[Coords, tuple[str, object]], topology: Topology
) -> RankExtras:
    """Collect the entries of rank files other than the model and the optimizer.

    Args:
        ranks: coordinates → (directory, content of the file).
        topology: parallel sizes of these ranks.

    Raises:
        CorruptError: the ranks are of different training steps.
    """
    # Keep the entries on which all ranks agree. Arguments have been compared field by field: some
    # of them differ between ranks.
    roots = [(folder, as_mapping(root) or {}) for folder, root in ranks.values()]
    common: dict[object, object] = {}
    dropped: list[Dropped] = []
    for name in dict.fromkeys(name for _, root in roots for name in root):
        if is_chunk(name) or name in (OPTIMIZER, RNG):
            continue
        reason = None if name == "args" else _reason_to_drop(name, roots)
        if reason is None:
            common[name] = roots[0][1].get(name)
        else:
            dropped += dropped_each((name,), reason)

    # torch_dist has one random state for each (PP, TP), that of the first such rank.
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
    """Return the reason why an entry cannot be kept for all ranks, or None if it can.

    Args:
        roots: (directory, content of the file) of every rank.

    Raises:
        CorruptError: the entry depends on the training step, and ranks disagree.
    """
    first_folder, first_root = roots[0]
    differing = next(
        (
            folder
            for folder, root in roots
            if name not in root or not are_same(root[name], first_root.get(name))
        ),
        None,
    )
    if differing is not None:
        if name in OF_THE_RUN:
            path, expected, actual = describe_difference(first_root, dict(roots)[differing], name)
            raise CorruptError(
                f"{path} is {actual}, but {expected} in {first_folder}",
                rank=differing,
                hint="check that all rank directories are from the same training step",
            )
        return "not the same on all ranks"

    # ``same`` does not compare the contents of tensors, so they may differ.
    has_tensors = any(isinstance(leaf, TensorLeaf) for leaf in walk(first_root.get(name)))
    return "contains tensors, one set per rank" if has_tensors and len(roots) > 1 else None
