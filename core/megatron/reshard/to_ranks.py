"""From the global per-layer form to rank files of a topology: the target catalog of
``core.formats.megatron.format``.

Target keys are the source's (global) keys; a fragment maps a box of the global tensor to a new
array, named ``<rank dir>:<path in the file>``, which is yet to be placed. The target has the fields
``args`` (updated), ``iteration``, ``zeros``, ``notes`` and ``dropped``, and the facets
``RankFacts`` and ``Topology``. ``RankFacts.transposed`` names tensors whose axes are in the other
order in files, and in this catalog; the source's must be brought into that order
(``core.megatron.rules.experts.transposed``).

Experts keep their kind. The legacy grouped one exists until megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.arrays.box import full_box
from core.catalog.catalog import Catalog, Fragment, TargetCatalog, TargetFragment, bind_nothing
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
    plan_entry,
    sharded_object,
)
from core.megatron.extras.extra_states import adapt_expert_states
from core.megatron.extras.nested_dicts import nested
from core.megatron.extras.order import by_place
from core.megatron.extras.random_states import kept_states
from core.megatron.model.args import facts_of
from core.megatron.model.checks import check_predictions
from core.megatron.model.cut import Cut, check_target, cuts_of, param_array, zeros_of
from core.megatron.model.facts import ModelFacts, pipeline_notes
from core.megatron.model.new_args import update_args
from core.megatron.model.pipeline import Pipeline
from core.megatron.model.topology import Rank, Topology, check_rank_files, rank_dir
from core.megatron.model.version import MegatronVersion
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.rank_state import HeldParam, OptimizerFiles
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
    """Plan the rank files of a topology, and return their target catalog (the module's docstring
    describes it).

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: sizes of the destination.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes the number that ``unshard`` found.
        rng: ``keep`` refuses to leave random states out (``core.megatron.extras.random_states``).
        version: the megatron-core that is to load the files; None writes the optimizer as the
            source's did.
        experts: ``sequential`` writes legacy grouped experts as one module each; None keeps their
            kind.

    Raises:
        UsageError: ``experts`` is given, but there are no legacy grouped ones.
        UnsupportedError: no training arguments, sizes that do not divide, a layout that cannot be
            written yet, random states that cannot be kept, or a vocabulary of unknown size.
        UnknownTensorError: no rule fits a name.
        CorruptError: shapes and arguments contradict each other.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))

    # Refuse what Megatron could not load.
    check_target(topology, facts)
    check_rank_files(topology)
    check_predictions(facts, topology)
    expert_names = _expert_names(catalog, facts, version=version, experts=experts)

    # Decide how every tensor is cut. The optimizer's files take its states, everything below is about the model.
    catalog = adapt_expert_states(catalog, topology, facts, rules, expert_names=expert_names)
    n_rows = rows_of(catalog, vocab_size)
    cuts = _cuts(catalog, topology, facts, rules, n_rows=n_rows, expert_names=expert_names)
    optimizer = _optimizer_files(catalog, topology, facts, rules, cuts, version)
    all_tensors = {
        key: catalog.tensors[key]
        for key in (*_keys(cuts, of_states=False), *_keys(cuts, of_states=True))
    }
    model = replace(
        catalog, tensors={key: catalog.tensors[key] for key in _keys(cuts, of_states=False)}
    )

    # Decide where every tensor lives.
    pipeline = (
        facts.pipeline_at(topology.pp, topology.vpp)
        if topology.pipeline is None
        else topology.pipeline
    )
    notes = [
        *catalog.notes,
        *_layout_notes(topology, facts, pipeline, version=version, experts=experts),
    ]
    places = homes_at(model, topology, facts, rules, pipeline=pipeline, expert_names=expert_names)
    plan = _ShardPlan(model, topology, facts, rules, cuts, places)
    homes, home_notes = plan.find_homes()
    notes += home_notes

    # Plan the files, rank by rank.
    args = _new_args(plan, pipeline, homes, is_grouped=None if experts is None else False)
    top_level = _top_level_entries(plan, args, rng=rng)
    files = _plan_files(plan, homes, top_level, optimizer)
    extras, arrays, dropped = files.extras, files.arrays, [*catalog.dropped, *top_level.dropped]
    if optimizer is not None:
        notes += optimizer.notes
        dropped += optimizer.dropped
        extras = extras | optimizer.beside
        arrays = arrays | optimizer.arrays

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        if key in homes:
            return files.fragments(plan, key, homes[key])
        if key in cuts:
            return optimizer.fragments(key) if optimizer is not None else ()
        return tuple(
            Fragment(key, full_box(array.shape), array, (0,) * len(array.shape))
            for array in extras.get(key, ())
        )

    zeros = {key: zeros_of(meta, cuts[key]) for key, meta in all_tensors.items()}
    rank_facts = RankFacts(
        ranks=files.ranks,
        planned=arrays | {array.name: array for copies in extras.values() for array in copies},
        optim_files={} if optimizer is None else optimizer.files,
        transposed=frozenset(key for key in all_tensors if cuts[key].is_transposed),
    )
    return Catalog(
        format="megatron",
        version=None,
        tensors={
            key: replace(meta, shape=cuts[key].target_shape) for key, meta in all_tensors.items()
        },
        fragments_of=fragments_of,
        objects={key: item for key, item in model.objects.items() if item.raw_key is None},
        hidden={key: model.meta(key) for key in extras},
        args=args,
        iteration=model.iteration,
        zeros={key: boxes for key, boxes in zeros.items() if boxes},
        notes=tuple(notes),
        dropped=tuple(dropped),
        write=model.write,
        facets={Topology: topology, RankFacts: rank_facts},
        bind=bind_nothing,
    )


def _keys(cuts: Mapping[str, Cut], *, of_states: bool) -> list[str]:
    """Return the keys of the optimizer's states, or those of the model, in order."""
    return [key for key in cuts if (state_of(key) is not None) == of_states]


def _expert_names(
    catalog: Catalog, facts: ModelFacts, *, version: MegatronVersion | None, experts: str | None
) -> str | None:
    """Return how the rank files name experts: as the source's did, unless each is to become a
    module.

    Raises:
        UsageError: ``experts`` is given, but the experts are not legacy grouped ones.
        UnsupportedError: the megatron-core that is to load the files has no legacy grouped experts.
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


def _cuts(
    catalog: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    *,
    n_rows: int | None,
    expert_names: str | None,
) -> dict[str, Cut]:
    """Return how rank files cut every tensor; legacy grouped experts are transposed in them."""
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=n_rows)
    if expert_names != "grouped":
        return cuts
    experts = {key: rules.expert_of(param_of(key)) for key in cuts}
    numbered = [
        key for key, expert in experts.items() if expert is not None and expert.number is not None
    ]
    return cuts | {key: replace(cuts[key], is_transposed=True) for key in numbered}


def _optimizer_files(
    catalog: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    cuts: Mapping[str, Cut],
    version: MegatronVersion | None,
) -> OptimizerFiles | None:
    """Return the files, still empty, that hold the optimizer; None if the catalog has none."""
    if catalog.optimizer is None:
        return None
    return optimizer_files(
        ReshardTarget(
            catalog=catalog,
            optimizer=catalog.optimizer,
            topology=topology,
            facts=facts,
            rules=rules,
            cuts=cuts,
            version=version,
        )
    )


def _layout_notes(
    topology: Topology,
    facts: ModelFacts,
    pipeline: Pipeline,
    *,
    version: MegatronVersion | None,
    experts: str | None,
) -> list[str]:
    """Return what the user should know about the layout.

    Raises:
        UnsupportedError: the megatron-core that is to load the files cannot run these sizes.
    """
    notes: list[str] = []
    if experts is not None:
        notes.append(
            "the experts of GroupedMLP become one module each (start Megatron without --moe-grouped-gemm)"
        )
    notes += pipeline_notes(facts, pipeline)
    if version is not None:
        version.check_sizes(
            tp=topology.tp, n_groups=facts.n_groups, has_layout=pipeline.layout is not None
        )
    elif topology.tp > facts.n_groups:
        notes.append(
            f"TP {topology.tp} is above the {facts.n_groups} query groups: megatron-core 0.16 and later load it"
        )
    return notes


@dataclass(frozen=True, slots=True)
class _ShardPlan:
    """A model and the layout that it gets.

    Args:
        model: the global per-layer form, without the optimizer's states.
        topology: sizes of the destination.
        facts: facts about the source.
        rules: the layout's table.
        cuts: key → how the destination cuts the tensor, states included.
        places: finds stage, chunk and name of each tensor in the files.
    """

    model: Catalog
    topology: Topology
    facts: ModelFacts
    rules: Rules
    cuts: Mapping[str, Cut]
    places: Homes

    @property
    def megatron(self) -> MegatronModel:
        """The form of the source's files, as far as the source says."""
        return self.model.facet(MegatronModel) or MegatronModel()

    def chunk_name(self, vp_rank: int) -> str:
        """Return the top-level entry of a model chunk: ``model``, or ``model0`` … where a rank has
        several.
        """
        return "model" if self.topology.vpp == 1 else f"model{vp_rank}"

    def find_homes(self) -> tuple[dict[str, list[Home]], list[str]]:
        """Return (key → where every copy of the tensor lives, what the user should know about
        it).
        """
        homes = {key: self.places.homes(key) for key in self.model.tensors}
        tied = tied_of(self.model, self.facts, self.rules) if self.topology.pp > 1 else None
        if tied is None:
            return homes, []
        # The last stage makes its output by a copy of the embedding, which the first stage has.
        head = self.facts.kind.head
        homes[tied].append(self.places.last(head))
        if self.facts.topology.pp > 1:
            return homes, []
        return homes, [
            f"{head} of the last stage is a copy of {tied}, as Megatron keeps shared embeddings"
        ]

    def extra_states(self) -> dict[str, object]:
        """Return the extra states by global name.

        torch_dist keeps none of a GPT model's output layer; rank files whose other modules have an
        empty one have it too.
        """
        states = {
            key: item.value
            for key, item in self.model.objects.items()
            if key.endswith("_extra_state") and item.raw_key is None
        }
        is_of_rank_files = self.megatron.top_level is not None
        if (
            self.facts.kind is GPT
            and not is_of_rank_files
            and any(value is None for value in states.values())
        ):
            states.setdefault("output_layer._extra_state", None)
        return states


def _new_args(
    plan: _ShardPlan,
    pipeline: Pipeline,
    homes: Mapping[str, Sequence[Home]],
    *,
    is_grouped: bool | None,
) -> object:
    """Return the training arguments for the sizes of the destination."""
    topology, rules, stages = plan.topology, plan.rules, plan.places.stages
    main_stack = plan.facts.kind.stacks[0]
    counts = [
        stages.count(main_stack, v, p) for v in range(topology.vpp) for p in range(topology.pp)
    ]
    # Rank files have every expert in parameters of its own; down projections too, where the model has several.
    unset = ["moe_single_grouped_weight", "moe_single_grouped_bias"]
    if not any(".linear_qkv_down_proj." in key for key in plan.model.tensors):
        unset.append("mla_down_proj_fusion")
    return update_args(
        plan.model.args,
        topology=topology,
        pipeline=pipeline,
        counts=counts,
        padded_vocab_size=next(
            (plan.cuts[key].shape[0] for key in homes if rules.rule_of(key).kind == "vocab"), None
        ),
        is_grouped=is_grouped,
        unset=unset,
    )


@dataclass(frozen=True, slots=True)
class _TopLevelEntries:
    """The top-level entries of the rank files.

    Args:
        names: all of them in the order of the files, ``model`` and ``optimizer`` included.
        common: entries that all ranks share.
        rng_states: rank → its random state, where there is one.
        dropped: entries that are left out, each with the reason.
    """

    names: Sequence[object]
    common: Mapping[object, object]
    rng_states: Mapping[Rank, object]
    dropped: Sequence[str]

    def of(self, rank: Rank) -> Iterator[tuple[object, object]]:
        """Yield (name, value) of a rank's entries in order; ``model`` and ``optimizer`` have the
        value None.
        """
        for name in self.names:
            if name in ("model", OPTIMIZER):
                yield name, None
            elif name == RNG:
                if rank in self.rng_states:
                    yield name, self.rng_states[rank]
            elif name in self.common:
                yield name, self.common[name]


def _top_level_entries(plan: _ShardPlan, args: object, *, rng: str | None) -> _TopLevelEntries:
    """Decide which entries the rank files have.

    Raises:
        UnsupportedError: the random states are to be kept and cannot be.
    """
    objects = plan.model.objects
    common = {
        name: value
        for name, value in common_of(plan.model).items()
        if name not in (CONTENT, OPTIMIZER, RERUN)
    }
    common["args"] = args
    states = kept_states(plan.model, plan.facts.topology, plan.topology, rng=rng)
    dropped = list(states.dropped)
    reruns = [key for key in objects if key.startswith(f"{RERUN}_state/")]
    if common_of(plan.model).get(RERUN) is not None or reruns:
        dropped.append(f"{RERUN} (of the ranks that saved it; Megatron starts without it)")
    dropped += [
        f"{key} (rank files have no place for it)"
        for key in objects
        if not key.startswith(f"{RNG}/") and key not in reruns and sharded_object(key) is not None
    ]
    names = dict.fromkeys([*(plan.megatron.top_level or ()), *TOP_LEVEL, *common])
    return _TopLevelEntries(tuple(names), common, states.by_rank, dropped)


@dataclass(frozen=True, slots=True)
class _PlannedChunk:
    """One model chunk of one rank's file.

    Args:
        name: top-level entry of the chunk.
        container: state dict of the chunk, whose tensors name the arrays.
        arrays: the arrays by name.
        parts: (name of an array, key of a tensor) → the array of just that tensor, where the first
            joins several.
        params: the tensors in the order of the file.
    """

    name: str
    container: object
    arrays: Mapping[str, PlannedArray | JoinedArray]
    parts: Mapping[tuple[str, str], PlannedArray]
    params: Sequence[HeldParam]


@dataclass(frozen=True, slots=True)
class _PlannedFiles:
    """The rank files that are to be written.

    Args:
        ranks: coordinates → (directory, content of its file).
        arrays: the model's arrays by name.
        parts: as in ``_PlannedChunk``, of all chunks.
        extras: key of a tensor outside of the model → the arrays that it goes to.
        holders: (pipeline stage, expert parallel rank, or None for all) → the ranks there, with
            their directories.
    """

    ranks: dict[Coords, tuple[str, object]] = field(default_factory=dict)
    arrays: dict[str, PlannedArray | JoinedArray] = field(default_factory=dict)
    parts: dict[tuple[str, str], PlannedArray] = field(default_factory=dict)
    extras: dict[str, list[PlannedArray]] = field(default_factory=dict)
    holders: dict[tuple[int, int | None], list[tuple[Rank, str]]] = field(default_factory=dict)

    def fragments(
        self, plan: _ShardPlan, key: str, homes: Sequence[Home]
    ) -> Sequence[TargetFragment]:
        """Return every piece of every copy of one of the model's tensors."""
        fragments: list[TargetFragment] = []
        for home in homes:
            chunk = plan.chunk_name(home.vp)
            for rank, folder in self.holders[home.pp, home.ep]:
                name = _array_name(folder, chunk, home.name)
                array = self.arrays[name]
                part = self.parts[name, key] if isinstance(array, JoinedArray) else array
                fragments += plan.cuts[key].fragments(key, rank, part)
        return tuple(fragments)


def _array_name(folder: str, chunk: str, name: str) -> str:
    return f"{folder}:{chunk}.{name}"


def _plan_files(
    plan: _ShardPlan,
    homes: Mapping[str, Sequence[Home]],
    top_level: _TopLevelEntries,
    optimizer: OptimizerFiles | None,
) -> _PlannedFiles:
    """Plan the file of every rank; the optimizer's files take each rank's parameters."""
    states = plan.extra_states()
    entries = by_rank(_ordered_entries(plan, homes, states), plan.topology, plan.rules)
    versions = by_chunk(
        (version, home)
        for module, version in plan.megatron.module_versions.items()
        for home in plan.places.module(module)
    )
    files = _PlannedFiles()
    weights = ValueCounter()
    for rank in plan.topology.ranks():
        coords, folder = plan.topology.coords(rank), rank_dir(plan.topology, rank)
        for ep_rank in (None, rank.ep):
            files.holders.setdefault((rank.pp, ep_rank), []).append((rank, folder))

        # The chunks come first, wherever they stand in the file: the optimizer's entry depends on their parameters.
        chunks: list[_PlannedChunk] = []
        for vp_rank in range(plan.topology.vpp):
            of_chunk = versions.get((vp_rank, rank.pp), ())
            modules = {home.name: version for version, home in of_chunk if home.has(rank)}
            names = entries.get((vp_rank, rank.pp, rank.ep), ())
            chunks.append(_plan_chunk(plan, rank, vp_rank, names, states=states, versions=modules))
            files.arrays.update(chunks[-1].arrays)
            files.parts.update(chunks[-1].parts)
        params = [param for chunk in chunks for param in chunk.params]

        root: dict[object, object] = {}
        for name, value in top_level.of(rank):
            if name == "model":
                root |= {chunk.name: chunk.container for chunk in chunks}
            elif name == OPTIMIZER:
                if optimizer is not None:
                    root[name] = optimizer.add(rank, folder, coords, params)
            else:
                entry = plan_entry(plan.model, value, f"{folder}:{name}", coords, weights=weights)
                root[name] = entry.value
                for key, array in entry.arrays:
                    files.extras.setdefault(key, []).append(array)
        files.ranks[coords] = (folder, root)
    return files


def _ordered_entries(
    plan: _ShardPlan, homes: Mapping[str, Sequence[Home]], states: Mapping[str, object]
) -> list[tuple[str, Home]]:
    """Return (global name, home) of all that the model's chunks hold, in the order of the files."""
    order = plan.megatron.order
    keys: Iterable[str] = [*homes, *states]
    keys = (
        sorted(keys, key=by_place(plan.rules)) if order is None else dict.fromkeys([*order, *keys])
    )
    places = [
        (key, home)
        for key in keys
        for home in homes.get(key) or ([plan.places.home(key)] if key in states else [])
    ]

    # A copy of the embedding is the weight of the output layer: it stands where that module does.
    head = plan.facts.kind.head
    entries = [(key, home) for key, home in places if home.name != head or key == head]
    copies = [(key, home) for key, home in places if home.name == head and key != head]
    module = head.rpartition(".")[0] + "."
    place = next(
        (i for i, (_, home) in enumerate(entries) if home.name.startswith(module)), len(entries)
    )
    return [*entries[:place], *copies, *entries[place:]]


def _plan_chunk(
    plan: _ShardPlan,
    rank: Rank,
    vp_rank: int,
    names: Sequence[tuple[str, str]],
    *,
    states: Mapping[str, object],
    versions: Mapping[str, object],
) -> _PlannedChunk:
    """Plan one model chunk of one rank's file.

    Args:
        names: (global name, name in the file) of its tensors and extra states, in order.
        states: extra states by global name.
        versions: module of this chunk → what torch notes about it.
    """
    folder, coords = rank_dir(plan.topology, rank), plan.topology.coords(rank)
    chunk = plan.chunk_name(vp_rank)
    tensors = plan.model.tensors

    # The state dict, in the order of the file; one array may hold the tensors of several experts.
    entries: dict[object, object] = {}
    params: list[HeldParam] = []
    keys_of: dict[str, list[str]] = {}
    for key, local in names:
        if key not in tensors:
            entries[local] = states[key]
            continue
        name = _array_name(folder, chunk, local)
        entries[local] = TensorLeaf(name)
        keys_of.setdefault(name, []).append(key)
        params.append(HeldParam(key, chunk, local))

    arrays: dict[str, PlannedArray | JoinedArray] = {}
    parts: dict[tuple[str, str], PlannedArray] = {}
    for name, keys in keys_of.items():
        array = arrays[name] = param_array(
            name, keys, tensors, plan.cuts, plan.rules, coords=coords
        )
        if isinstance(array, JoinedArray):
            parts |= {(name, key): part for key, (_, part) in zip(keys, array.parts, strict=True)}

    # A dict or an OrderedDict with its modules' versions, nested or not: as the source has it.
    container = nested(entries, versions, {"": plan.megatron.is_ordered, **plan.megatron.nesting})
    return _PlannedChunk(chunk, container, arrays, parts, params)
