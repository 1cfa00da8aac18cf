"""From the global per-layer form to rank files of a topology: the target catalog of ``core.formats.megatron.format``.

Target keys are the source's (global) keys; a fragment maps a box of the global tensor to a new array, named
``<rank dir>:<path in the file>``, which is yet to be placed. The result has the fields ``args`` (updated),
``iteration``, ``zeros``, ``notes`` and ``dropped``, and the facets ``RankFacts`` and ``Topology``.
``RankFacts.transposed`` names tensors whose axes are in the other order in files, and in this catalog; the source's
must be brought into that order (``core.megatron.rules.experts.transposed``).

Experts keep their kind. The legacy grouped one exists until megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from core.arrays.box import Shape, full_box
from core.catalog.catalog import Catalog, Fragment, TargetCatalog, TargetFragment, TensorMeta, bind_nothing
from core.catalog.facets import MegatronModel, RankFacts
from core.catalog.file_image import JoinedArray
from core.catalog.optimizer_keys import param_of, state_of
from core.catalog.stored import Coords, PlannedArray
from core.errors import UnsupportedError, UsageError
from core.megatron.extras.common_state import (
    CONTENT,
    OPTIMIZER,
    RERUN,
    RNG,
    TOP_LEVEL,
    common_of,
    sharded_object,
    with_arrays,
)
from core.megatron.extras.extra_states import for_experts
from core.megatron.extras.nested_dicts import nested
from core.megatron.extras.order import by_place
from core.megatron.extras.random_states import kept_states
from core.megatron.model.args import facts_of
from core.megatron.model.checks import check_predictions
from core.megatron.model.cut import Cut, check_target, cuts_of, param_array, zeros_of
from core.megatron.model.facts import Facts, pipeline_notes
from core.megatron.model.new_args import updated
from core.megatron.model.topology import Rank, Topology, check_rank_files, rank_dir
from core.megatron.model.version import MegatronVersion
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.rank_state import HeldParam
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.placement.homes import Home, Homes, by_chunk, by_rank, homes_at, tied_of
from core.megatron.reshard.rank_optimizer import optimizer_files
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import GPT, Rules
from core.pickle.inert import TensorLeaf, ValueCounter


def shard(
    catalog: Catalog,
    topology: Topology,
    *,
    rules: Rules,
    vocab_size: int | None = None,
    rng: str | None = None,
    version: MegatronVersion | None = None,
    experts: str | None = None,
) -> TargetCatalog:
    """The target catalog of rank files; see the module's docstring.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: sizes of the destination.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes what ``unshard`` found.
        rng: ``keep`` refuses to leave random states out (``core.megatron.extras.random_states``).
        version: the megatron-core that is to load the files; None writes the optimizer as the source's did.
        experts: ``sequential`` writes legacy grouped experts as one module each; None keeps their kind.

    Raises:
        UsageError: ``experts``, but there are no legacy grouped ones.
        UnsupportedError: no training arguments, sizes that do not divide, a layout that cannot be written yet, random
            states that cannot be kept, or a vocabulary of unknown size.
        UnknownTensorError: no rule fits a name.
        CorruptError: shapes and arguments contradict each other.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    check_target(topology, facts)
    check_rank_files(topology)
    check_predictions(facts, topology)
    n_rows = rows_of(catalog, vocab_size)
    notes, dropped = list(catalog.notes), list(catalog.dropped)
    names = _expert_names(catalog, facts, version=version, experts=experts)
    catalog = for_experts(catalog, topology, facts, rules, dropped, names=names)
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=n_rows)
    if names == "grouped":
        of_experts = [key for key in cuts if (expert := rules.expert_of(param_of(key))) and expert.number is not None]
        cuts |= {key: replace(cuts[key], is_transposed=True) for key in of_experts}
    optimizer = catalog.optimizer
    optim = None
    if optimizer is not None:
        target = ReshardTarget(
            catalog=catalog,
            optimizer=optimizer,
            topology=topology,
            facts=facts,
            rules=rules,
            cuts=cuts,
            version=version,
        )
        optim = optimizer_files(target)
    states = {key: catalog.tensors[key] for key in cuts if state_of(key) is not None}
    catalog = replace(catalog, tensors={key: meta for key, meta in catalog.tensors.items() if key not in states})
    if experts is not None:
        notes.append("the experts of GroupedMLP become one module each (start Megatron without --moe-grouped-gemm)")
    pipeline = facts.pipeline_at(topology.pp, topology.vpp) if topology.pipeline is None else topology.pipeline
    notes += pipeline_notes(facts, pipeline)
    if version is not None:
        version.check_sizes(tp=topology.tp, n_groups=facts.n_groups, has_layout=pipeline.layout is not None)
    elif topology.tp > facts.n_groups:
        notes.append(
            f"TP {topology.tp} is above the {facts.n_groups} query groups: megatron-core 0.16 and later load it"
        )
    places = homes_at(catalog, topology, facts, rules, pipeline=pipeline, expert_names=names)
    homes = {key: places.homes(key) for key in catalog.tensors}
    tied = tied_of(catalog, facts, rules) if topology.pp > 1 else None
    if tied is not None:
        homes[tied].append(places.last(facts.kind.head))
        if facts.topology.pp == 1:
            notes.append(
                f"{facts.kind.head} of the last stage is a copy of {tied}, as Megatron keeps shared embeddings"
            )
    objects = _rank_objects(catalog, facts)
    files = _Files(catalog, topology, cuts, homes, objects, rules)
    padded = next((cuts[key].shape[0] for key in homes if rules.rule_of(key).kind == "vocab"), None)
    args = updated(
        catalog.args,
        topology=topology,
        pipeline=pipeline,
        counts=[
            places.stages.count(facts.kind.stacks[0], v, p) for v in range(topology.vpp) for p in range(topology.pp)
        ],
        padded_vocab_size=padded,
        is_grouped=None if experts is None else False,
        unset=_not_as_before(catalog),
    )
    entries_beside = _entries_beside(catalog, topology, facts, args, rng=rng, dropped=dropped)
    entries = by_rank(_entries(catalog, homes, objects, places, rules, head=facts.kind.head), topology, rules)
    model = catalog.facet(MegatronModel) or MegatronModel()
    versions = by_chunk(
        (version, home) for module, version in model.module_versions.items() for home in places.module(module)
    )
    ranks: dict[Coords, tuple[str, object]] = {}
    beside: dict[str, list[PlannedArray]] = {}
    weights = ValueCounter()
    for rank in topology.ranks():
        coords = topology.coords(rank)
        folder = rank_dir(topology, rank)
        root: dict[object, object] = {}
        held: list[HeldParam] = []
        for name, value in entries_beside(rank).items():
            if name == OPTIMIZER:
                if optim is not None:
                    root[name] = optim.add(rank, folder, coords, held)
                continue
            if name != "model":
                root[name] = with_arrays(catalog, value, f"{folder}:{name}", coords, beside, weights=weights)
                continue
            for vp_rank in range(topology.vpp):
                chunk = _chunk_name(topology, vp_rank)
                here = entries.get((vp_rank, rank.pp, rank.ep), ())
                made = files.entries(folder, coords, chunk, here)
                held += [HeldParam(key, chunk, local) for key, local in here if key in homes]
                mine = {home.name: found for found, home in versions.get((vp_rank, rank.pp), ()) if home.has(rank)}
                root[chunk] = _container(catalog, made, mine)
        ranks[coords] = (folder, root)
    every = {**catalog.tensors, **states}
    zeros = {key: boxes for key, meta in every.items() if (boxes := zeros_of(meta, cuts[key]))}
    if optim is not None:
        notes += optim.notes
        dropped += optim.dropped
        beside |= optim.beside
        files.arrays |= optim.arrays
    arrays = files.arrays | {one.name: one for many in beside.values() for one in many}

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        if key in states:
            return optim.fragments(key) if optim is not None else ()
        if key in cuts:
            return files.fragments(key)
        return tuple(Fragment(key, full_box(one.shape), one, (0,) * len(one.shape)) for one in beside.get(key, ()))

    rank_facts = RankFacts(
        ranks=ranks,
        planned=arrays,
        optim_files={} if optim is None else optim.files,
        transposed=frozenset(key for key in every if cuts[key].is_transposed),
    )
    return Catalog(
        format="megatron",
        version=None,
        tensors={key: _shaped(meta, cuts[key].target_shape) for key, meta in every.items()},
        fragments_of=fragments_of,
        objects={key: item for key, item in catalog.objects.items() if item.raw_key is None},
        hidden={key: catalog.meta(key) for key in beside},
        args=args,
        iteration=catalog.iteration,
        zeros=zeros,
        notes=tuple(notes),
        dropped=tuple(dropped),
        write=catalog.write,
        facets={Topology: topology, RankFacts: rank_facts},
        bind=bind_nothing,
    )


def _shaped(meta: TensorMeta, shape: Shape) -> TensorMeta:
    return meta if meta.shape == shape else replace(meta, shape=shape)


class _Files:
    """The model tensors of the rank files that are to be written.

    Args:
        catalog: the global per-layer form.
        topology: sizes of the destination.
        cuts: key → how it is cut.
        homes: key → where every copy lives.
        objects: extra states by global name.
        rules: the layout's table.
    """

    def __init__(
        self,
        catalog: Catalog,
        topology: Topology,
        cuts: Mapping[str, Cut],
        homes: Mapping[str, Sequence[Home]],
        objects: Mapping[str, object],
        rules: Rules,
    ) -> None:
        self._catalog = catalog
        self._rules = rules
        self._topology = topology
        self._cuts = cuts
        self._homes = homes
        self._objects = objects
        self.arrays: dict[str, PlannedArray | JoinedArray] = {}
        """What leaves stand for, by name; made with the entries."""
        self._pieces: dict[tuple[str, str], PlannedArray] = {}
        """(name of a joined array, global name) → what holds the tensor in it."""
        self._ranks: dict[tuple[int, int | None], list[tuple[Rank, str]]] = {}
        for rank in topology.ranks():
            for ep_rank in (None, rank.ep):
                self._ranks.setdefault((rank.pp, ep_rank), []).append((rank, rank_dir(topology, rank)))

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """The fragments of one tensor: every piece of every copy."""
        cut = self._cuts[key]
        found: list[TargetFragment] = []
        for home in self._homes[key]:
            chunk = _chunk_name(self._topology, home.vp)
            for rank, folder in self._ranks[home.pp, home.ep]:
                name = _array_name(folder, chunk, home.name)
                array = self.arrays[name]
                part = self._pieces[name, key] if isinstance(array, JoinedArray) else array
                found += cut.fragments(key, rank, part)
        return tuple(found)

    def entries(
        self, folder: str, coords: Coords, chunk: str, names: Sequence[tuple[str, str]]
    ) -> dict[object, object]:
        """The state dict of one chunk of one rank.

        Args:
            names: (global name, name in the file) in order.
        """
        made: dict[object, object] = {}
        held: dict[str, list[str]] = {}
        tensors = self._catalog.tensors
        for key, local in names:
            if key not in self._homes:
                made[local] = self._objects[key]
                continue
            name = _array_name(folder, chunk, local)
            made[local] = TensorLeaf(name)
            held.setdefault(name, []).append(key)
        for name, keys in held.items():
            array = param_array(name, keys, tensors, self._cuts, self._rules, coords=coords)
            self.arrays[name] = array
            if isinstance(array, JoinedArray):
                self._pieces |= {(name, key): part for key, (_, part) in zip(keys, array.parts, strict=True)}
        return made


def _expert_names(
    catalog: Catalog, facts: Facts, *, version: MegatronVersion | None, experts: str | None
) -> str | None:
    """Return how the rank files name experts: as the source's did, unless they are to be single ones.

    Raises:
        UsageError: they are, but are not legacy grouped ones.
        UnsupportedError: the megatron-core that is to load them has no legacy grouped ones.
    """
    names = (catalog.facet(MegatronModel) or MegatronModel()).expert_names or facts.expert_names
    if experts is not None:
        if names != "grouped":
            raise UsageError(
                f"{OPTION} {experts} has no effect: the checkpoint has no experts of the old GroupedMLP",
                hint="leave it out",
            )
        return experts
    if names == "grouped" and version is not None and not version.has_grouped_mlp:
        raise UnsupportedError(
            f"the experts are those of GroupedMLP (experts.weight1), which megatron-core {version} does not have",
            hint=f"write one module for each expert with {OPTION} sequential",
        )
    return names


def _not_as_before(catalog: Catalog) -> list[str]:
    """Arguments for what rank files have in several parameters: experts always, down projections where they do."""
    is_joined = any(".linear_qkv_down_proj." in key for key in catalog.tensors)
    names = ["moe_single_grouped_weight", "moe_single_grouped_bias"]
    return names if is_joined else [*names, "mla_down_proj_fusion"]


def _array_name(folder: str, chunk: str, name: str) -> str:
    return f"{folder}:{chunk}.{name}"


def _chunk_name(topology: Topology, vp_rank: int) -> str:
    return "model" if topology.vpp == 1 else f"model{vp_rank}"


def _rank_objects(catalog: Catalog, facts: Facts) -> dict[str, object]:
    """Extra states by global name.

    torch_dist keeps none of a GPT model's output layer; rank files whose other modules have an empty one have it too.
    """
    found = {
        key: item.value
        for key, item in catalog.objects.items()
        if key.endswith("_extra_state") and item.raw_key is None
    }
    model = catalog.facet(MegatronModel)
    is_of_files = model is not None and model.top_level is not None
    if facts.kind is GPT and not is_of_files and any(value is None for value in found.values()):
        found.setdefault("output_layer._extra_state", None)
    return found


def _entries(
    catalog: Catalog,
    homes: Mapping[str, Sequence[Home]],
    objects: Mapping[str, object],
    places: Homes,
    rules: Rules,
    *,
    head: str,
) -> list[tuple[str, Home]]:
    """(global name, home) of everything that files hold, in their order.

    Args:
        head: the name of a copy of the embedding.
    """
    order = (catalog.facet(MegatronModel) or MegatronModel()).order
    names: Iterable[str] = [*homes, *objects]
    names = sorted(names, key=by_place(rules)) if order is None else dict.fromkeys([*order, *names])
    found: list[tuple[str, Home]] = []
    copies: list[tuple[str, Home]] = []
    for key in names:
        for home in homes.get(key) or ([places.home(key)] if key in objects else []):
            (copies if home.name == head != key else found).append((key, home))
    module = head.rpartition(".")[0] + "."
    place = next((i for i, (_, home) in enumerate(found) if home.name.startswith(module)), len(found))
    return [*found[:place], *copies, *found[place:]]


def _container(catalog: Catalog, entries: dict[object, object], versions: Mapping[str, object]) -> object:
    """A state dict as the source has it: a dict, or an OrderedDict with its modules' versions, and nested or not."""
    model = catalog.facet(MegatronModel) or MegatronModel()
    return nested(entries, versions, {"": model.is_ordered, **model.nesting})


def _entries_beside(
    catalog: Catalog, topology: Topology, facts: Facts, args: object, *, rng: str | None, dropped: list[str]
) -> Callable[[Rank], dict[object, object]]:
    """A function that gives the top-level entries of a rank's file in order, ``model`` and ``optimizer`` among them."""
    common = dict(common_of(catalog))
    common.pop(CONTENT, None)
    common.pop(OPTIMIZER, None)
    common["args"] = args
    states = kept_states(catalog, facts.topology, topology, rng=rng, dropped=dropped)
    reruns = [key for key in catalog.objects if key.startswith(f"{RERUN}_state/")]
    if common.pop(RERUN, None) is not None or reruns:
        dropped.append(f"{RERUN} (of the ranks that saved it; Megatron starts without it)")
    dropped += [
        f"{key} (rank files have no place for it)"
        for key in catalog.objects
        if not key.startswith(f"{RNG}/") and key not in reruns and sharded_object(key) is not None
    ]
    model = catalog.facet(MegatronModel) or MegatronModel()
    order = [*(model.top_level or ()), *TOP_LEVEL, *common]

    def entries(rank: Rank) -> dict[object, object]:
        found: dict[object, object] = {}
        for name in dict.fromkeys(order):
            if name in ("model", OPTIMIZER):
                found[name] = None
            elif name == RNG:
                if rank in states:
                    found[name] = states[rank]
            elif name in common:
                found[name] = common[name]
        return found

    return entries
