"""From the global per-layer form to rank files of a topology: the target catalog of ``core.formats.megatron``.

Target keys are the source's (global) keys; a fragment maps a box of the global tensor to a new array, named
``<rank dir>:<path in the file>``, which has no extent yet. attrs of the result:

* ``ranks``: coordinates → (rank directory, skeleton of the file), for ``lay_out``;
* ``zeros``: key → boxes of the target tensor that no source holds (vocabulary padding);
* ``args`` (updated), ``topology``, ``iteration``, ``notes``, ``dropped``, ``is_rank_local``.

Not supported: more than one model chunk a stage, expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.box import whole
from core.catalog import Catalog, Coords, Fragment, StoredArray, StoredObject, bind_nothing
from core.errors import CorruptError, UnsupportedError
from core.inert import TensorLeaf, as_mapping, ordered_dict, walk
from core.layout_args import Facts, facts_of, updated
from core.layout_checks import OUTPUT
from core.layout_cut import Cut, check_target, cut_of, zeros_of
from core.layout_rules import Rules
from core.layout_state import (
    CONTENT,
    OPTIMIZER,
    RERUN,
    RNG,
    TOP_LEVEL,
    common_of,
    renamed_leaves,
    rng_grid,
    rng_key,
    sharded_object,
    texts_of,
)
from core.layout_vocab import rows_of
from core.topology import LayerSplit, Topology, rank_dir

OUTPUT_MODULE = OUTPUT.rpartition(".")[0] + "."


def shard(catalog: Catalog, topology: Topology, *, rules: Rules, vocab_size: int | None = None) -> Catalog:
    """The target catalog of rank files; see the module's docstring.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: sizes of the destination.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes what ``unshard`` found.

    Raises:
        UnsupportedError: no training arguments, sizes that do not divide, a layout that cannot be written yet, or a
            vocabulary of unknown size.
        UnknownTensorError: no rule fits a name.
        CorruptError: shapes and arguments contradict each other.
    """
    check_target(topology)
    facts = facts_of(catalog.attrs.get("args"))
    layers = facts.split(topology.pp)
    n_rows = rows_of(catalog, vocab_size)
    cuts: dict[str, Cut] = {}
    homes: dict[str, list[tuple[int, str]]] = {}
    for key, meta in catalog.tensors.items():
        rule = rules.rule_of(key, shapes=[meta.shape])
        cuts[key] = cut_of(meta, rule, facts, tp=topology.tp, n_rows=n_rows)
        homes[key] = [_home(key, layers, topology, rules)]
    notes, dropped = texts_of(catalog, "notes"), texts_of(catalog, "dropped")
    tied = _tied(catalog, facts, rules) if topology.pp > 1 else None
    if tied is not None:
        homes[tied].append((topology.pp - 1, OUTPUT))
        if facts.topology.pp == 1:
            notes.append(f"{OUTPUT} of the last stage is a copy of {tied}, as Megatron keeps shared embeddings")
    objects = _rank_objects(catalog)
    files = _Files(catalog, topology, cuts, homes, objects)
    padded = next((cuts[key].shape[0] for key in cuts if rules.rule_of(key).kind == "vocab"), None)
    args = updated(catalog.attrs.get("args"), topology=topology, padded_vocab_size=padded)
    states = _states_beside(catalog, topology, args, dropped)
    ranks: dict[Coords, tuple[str, object]] = {}
    beside: dict[str, list[StoredArray]] = {}
    stage_names = [
        _names_of_stage(catalog, homes, objects, stage, layers, topology, rules) for stage in range(topology.pp)
    ]
    for tp_rank, pp_rank in topology.ranks():
        coords = topology.coords(tp_rank, pp_rank)
        folder = rank_dir(topology, tp_rank=tp_rank, pp_rank=pp_rank)
        root: dict[object, object] = {}
        for name, value in states(tp_rank, pp_rank).items():
            if name == "model":
                versions = _versions_of_stage(catalog, pp_rank, layers, topology, rules)
                root[name] = _container(catalog, files.entries(folder, stage_names[pp_rank]), versions)
            else:
                root[name] = _with_arrays(catalog, value, f"{folder}:{name}", coords, beside)
        ranks[coords] = (folder, root)
    zeros = {key: boxes for key, meta in catalog.tensors.items() if (boxes := zeros_of(meta, cuts[key]))}

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in cuts:
            return files.fragments(key)
        return tuple(Fragment(key, whole(one.shape), one, (0,) * len(one.shape)) for one in beside.get(key, ()))

    return Catalog(
        format="megatron",
        version=None,
        tensors={key: replace(meta, shape=cuts[key].shape) for key, meta in catalog.tensors.items()},
        fragments_of=fragments_of,
        objects={key: item for key, item in catalog.objects.items() if item.raw_key is None},
        hidden={key: catalog.meta(key) for key in beside},
        attrs={
            "family": "megatron",
            "is_rank_local": True,
            "args": args,
            "iteration": catalog.attrs.get("iteration"),
            "topology": topology,
            "ranks": ranks,
            "zeros": zeros,
            "notes": notes,
            "dropped": dropped,
        },
        bind=bind_nothing,
    )


class _Files:
    """The model tensors of the rank files that are to be written.

    Args:
        catalog: the global per-layer form.
        topology: sizes of the destination.
        cuts: key → how it is cut.
        homes: key → (pipeline stage, name in its files) of every copy.
        objects: extra states by global name.
    """

    def __init__(
        self,
        catalog: Catalog,
        topology: Topology,
        cuts: Mapping[str, Cut],
        homes: Mapping[str, Sequence[tuple[int, str]]],
        objects: Mapping[str, object],
    ) -> None:
        self._catalog = catalog
        self._topology = topology
        self._cuts = cuts
        self._homes = homes
        self._objects = objects

    def fragments(self, key: str) -> Sequence[Fragment]:
        """The fragments of one tensor: every piece of every copy."""
        cut = self._cuts[key]
        dtype = self._catalog.tensors[key].dtype
        found = []
        for stage, name in self._homes[key]:
            for tp_rank in range(self._topology.tp):
                folder = rank_dir(self._topology, tp_rank=tp_rank, pp_rank=stage)
                coords = self._topology.coords(tp_rank, stage)
                array = StoredArray(_array_name(folder, name), dtype, cut.shard_shape, coords=coords)
                found += [Fragment(key, piece.box, array, piece.at) for piece in cut.pieces(tp_rank)]
        return tuple(found)

    def entries(self, folder: str, names: Sequence[tuple[str, str]]) -> dict[object, object]:
        """The state dict of one rank.

        Args:
            names: (global name, name in the file) in order.
        """
        return {
            local: TensorLeaf(_array_name(folder, local)) if key in self._homes else self._objects[key]
            for key, local in names
        }


def _array_name(folder: str, name: str) -> str:
    return f"{folder}:model.{name}"


def _home(key: str, layers: LayerSplit, topology: Topology, rules: Rules) -> tuple[int, str]:
    """(pipeline stage, name in its files) of a tensor or extra state.

    Raises:
        CorruptError: there is no such layer.
        UnsupportedError: no row says where it lives.
    """
    found = rules.layer_of(key)
    if found is not None:
        if found[0] >= layers.n_layers:
            raise CorruptError(f"there is no layer {found[0]} in a model of {layers.n_layers}", key=key)
        _, stage, local = layers.chunk_of(found[0])
        return stage, rules.layer_name(local, found[1])
    place = rules.stage_of(key)
    if place is None:
        raise UnsupportedError(
            "no row says in which pipeline stage this tensor lives",
            key=key,
            hint=f"pass a file with --rules that says: [[stage]] pattern = '^{key}$' stage = \"last\"",
        )
    return (0 if place == "first" else topology.pp - 1), key


def _tied(catalog: Catalog, facts: Facts, rules: Rules) -> str | None:
    """The tensor that the output layer shares, if it does."""
    if not facts.is_tied:
        return None
    shared = rules.rule_of(OUTPUT).tied
    return shared if shared in catalog.tensors else None


def _rank_objects(catalog: Catalog) -> dict[str, object]:
    """Extra states by global name.

    torch_dist keeps none of the output layer; rank files whose other modules have an empty one have it too.
    """
    found = {
        key: item.value
        for key, item in catalog.objects.items()
        if key.endswith("_extra_state") and item.raw_key is None
    }
    if "top_level" not in catalog.attrs and any(value is None for value in found.values()):
        found.setdefault("output_layer._extra_state", None)
    return found


def _names_of_stage(
    catalog: Catalog,
    homes: Mapping[str, Sequence[tuple[int, str]]],
    objects: Mapping[str, object],
    stage: int,
    layers: LayerSplit,
    topology: Topology,
    rules: Rules,
) -> list[tuple[str, str]]:
    """(global name, name in the file) of everything in a stage's files, in order."""
    order = catalog.attrs.get("order")
    names = dict.fromkeys(order if isinstance(order, tuple) else ())
    names |= dict.fromkeys([*homes, *objects])
    found: list[tuple[str, str]] = []
    copies: list[tuple[str, str]] = []
    for key in names:
        for where, local in homes.get(key) or ([_home(key, layers, topology, rules)] if key in objects else []):
            if where == stage:
                (copies if local == OUTPUT != key else found).append((key, local))
    place = next((i for i, (_, local) in enumerate(found) if local.startswith(OUTPUT_MODULE)), len(found))
    return [*found[:place], *copies, *found[place:]]


def _versions_of_stage(
    catalog: Catalog, stage: int, layers: LayerSplit, topology: Topology, rules: Rules
) -> dict[object, object]:
    """What torch notes about the modules of a stage (``_metadata`` of its state dict)."""
    found: dict[object, object] = {}
    for module, version in (as_mapping(catalog.attrs.get("module_versions")) or {}).items():
        name = str(module)
        layer = rules.layer_of(name + ".")
        if layer is not None:
            if layer[0] < layers.n_layers:
                where, local = _home(name + ".", layers, topology, rules)
                if where == stage:
                    found[local[:-1]] = version
            continue
        place = rules.stage_of(name)
        if place is None or stage == (0 if place == "first" else topology.pp - 1):
            found[name] = version
    return found


def _container(catalog: Catalog, entries: dict[object, object], versions: dict[object, object]) -> object:
    """A state dict as the source has it: a dict, or an OrderedDict with its modules' versions."""
    if not catalog.attrs.get("is_ordered", True):
        return entries
    made = ordered_dict(entries)
    if versions:
        made.state = {"_metadata": ordered_dict(versions)}
    return made


def _states_beside(
    catalog: Catalog, topology: Topology, args: object, dropped: list[str]
) -> Callable[[int, int], dict[object, object]]:
    """A function that gives the top-level entries of a rank's file, ``model`` among them, in order."""
    common = dict(common_of(catalog))
    common.pop(CONTENT, None)
    common.pop(OPTIMIZER, None)
    common["args"] = args
    states = {key: item for key, item in catalog.objects.items() if key.startswith(f"{RNG}/")}
    grid = rng_grid(list(states))
    keeps_rng = grid == (topology.tp, topology.pp) and all(item.raw_key is None for item in states.values())
    if states and not keeps_rng:
        was = f"of TP{grid[0]} PP{grid[1]}" if grid else "of another layout"
        dropped.append(f"{RNG} ({was}, not TP{topology.tp} PP{topology.pp}; start Megatron with --no-load-rng)")
    reruns = [key for key in catalog.objects if key.startswith(f"{RERUN}_state/")]
    if common.pop(RERUN, None) is not None or reruns:
        dropped.append(f"{RERUN} (of a run of other sizes; Megatron ignores it)")
    dropped += [
        f"{key} (rank files have no place for it)"
        for key in catalog.objects
        if key not in states and key not in reruns and sharded_object(key) is not None
    ]
    known = catalog.attrs.get("top_level")
    order = [*(known if isinstance(known, tuple) else TOP_LEVEL), *TOP_LEVEL, *common]

    def entries(tp_rank: int, pp_rank: int) -> dict[object, object]:
        found: dict[object, object] = {}
        for name in dict.fromkeys(order):
            if name == "model":
                found[name] = None
            elif name == RNG:
                if keeps_rng:
                    found[name] = _unwrapped(states[rng_key(tp_rank, pp_rank, tp=topology.tp, pp=topology.pp)])
            elif name in common:
                found[name] = common[name]
        return found

    return entries


def _unwrapped(item: StoredObject) -> object:
    """The value of a ShardedObject, which torch_dist keeps in a list of one."""
    value = item.value
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _with_arrays(
    catalog: Catalog, value: object, name: str, coords: Coords, beside: dict[str, list[StoredArray]]
) -> object:
    """An entry whose tensors are arrays of this rank's file; notes them in ``beside`` by the source's key."""
    if not any(isinstance(leaf, TensorLeaf) for leaf in walk(value)):
        return value

    def new_key(path: str, old: str) -> str:
        made = f"{name}.{path}" if path else name
        meta = catalog.meta(old)
        beside.setdefault(old, []).append(StoredArray(made, meta.dtype, meta.shape, coords=coords))
        return made

    return renamed_leaves(value, new_key)
