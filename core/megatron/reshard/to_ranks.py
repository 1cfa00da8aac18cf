"""Shard the global per-layer form: plan the rank files of a topology.

The result is a target catalog for ``core.formats.megatron.format``. Its keys are the source's
(global) keys; a fragment maps a box of the global tensor to a new array, named ``<rank dir>:<path
in the file>``, which has no file position yet. The catalog has the fields ``args`` (updated),
``iteration``, ``notes`` and ``dropped``, and the facets ``RankFacts`` and ``Topology``.
``RankFacts.transposed`` names tensors whose axes are in the other order in files and in this
catalog; the source's must be brought into that order (``core.megatron.rules.experts.transposed``).

Experts keep the form of their names (``core.megatron.placement.expert_kind`` changes it). The
legacy grouped form exists up to megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.facets import MegatronModel, RankFacts
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import param_of, split_state_key
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import TargetFragment, Tensor, bind_argument, whole_tensor
from core.errors import UnsupportedError
from core.megatron.extras.common_state import (
    CONTENT,
    OF_RANKS,
    OPTIMIZER,
    RERUN,
    RNG,
    TOP_LEVEL,
    get_common_state,
    plan_entry,
)
from core.megatron.extras.extra_states import adapt_expert_states, without_unexpected_states
from core.megatron.extras.nested_dicts import nested
from core.megatron.extras.order import by_place
from core.megatron.extras.random_states import kept_states
from core.megatron.extras.sharded_objects import sharded_object
from core.megatron.model.args import SINCE_0_19, fields_of, parse_facts
from core.megatron.model.cut import (
    Cut,
    check_head_gates,
    check_parallel_sizes,
    check_towers,
    cuts_of,
    param_array,
)
from core.megatron.model.facts import ModelFacts, pipeline_notes
from core.megatron.model.new_args import update_args
from core.megatron.model.pipeline import Pipeline
from core.megatron.model.topology import Rank, Topology, check_rank_files, rank_dir
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.rank_state import HeldParam, OptimizerFiles
from core.megatron.placement.homes import Home, Homes, by_chunk, by_rank, homes_at, tied_of
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import GPT, Rules, has_value_head
from core.pickle.inert import TensorLeaf, ValueCounter
from core.values import dataclass

if TYPE_CHECKING:
    from core.megatron.model.version import MegatronVersion


def shard(
    catalog: Catalog,
    topology: Topology,
    *,
    rules: Rules,
    vocab_size: int | None = None,
    rng: str | None = None,
    version: MegatronVersion | None = None,
) -> TargetCatalog:
    """Return the target catalog of rank files (the module's docstring describes it).

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: sizes of the destination.
        rules: the layout's rules.
        vocab_size: rows of the vocabulary without padding; None takes the number that ``unshard``
            found.
        rng: ``keep`` refuses to drop random states (``core.megatron.extras.random_states``).
        version: the megatron-core that is to load the files; None writes the optimizer as the
            source's did.

    Raises:
        UnsupportedError: the training arguments are missing, sizes do not divide, the layout cannot
            be written yet or not for ``version``, random states cannot be kept, or the size of the
            vocabulary is unknown.
        UnknownTensorError: no rule matches a name.
        CorruptError: shapes and arguments contradict each other.
    """
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))

    # Refuse what Megatron could not load.
    check_towers(catalog, "megatron")
    check_head_gates(catalog.args, "megatron")
    check_parallel_sizes(topology, facts)
    check_rank_files(topology)
    described = catalog.facet(MegatronModel) or MegatronModel()
    expert_names = described.expert_names or facts.expert_names
    if expert_names == "grouped" and version is not None and not version.has_grouped_mlp:
        raise UnsupportedError(
            f"the model has GroupedMLP experts (experts.weight1), which megatron-core {version} "
            "does not support",
            hint=f"write one module per expert with {OPTION} sequential",
        )

    # Decide how every tensor is cut. Weights of legacy grouped experts are transposed in files.
    catalog = without_unexpected_states(catalog, is_local=facts.is_local)
    catalog = adapt_expert_states(catalog, topology, facts, rules, expert_names=expert_names)
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))
    if expert_names == "grouped":
        for key, cut in cuts.items():
            expert = rules.expert_of(param_of(key))
            if expert is not None and expert.number is not None:
                cuts[key] = replace(cut, is_transposed=True)

    # The optimizer's files take its states; everything below is about the model.
    optimizer = None
    if catalog.optimizer is not None:
        from core.megatron.optimizer.reshard_target import ReshardTarget
        from core.megatron.reshard.rank_optimizer import optimizer_files

        optimizer = optimizer_files(
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
    model = replace(
        catalog, tensors={key: catalog.tensors[key] for key in cuts if split_state_key(key) is None}
    )

    # Decide which chunk of which pipeline stage holds each tensor.
    pipeline = topology.pipeline
    if pipeline is None:
        pipeline = facts.pipeline_at(topology.pp, topology.vpp)
    layout_notes = _layout_notes(topology, facts, pipeline, version=version)
    places = homes_at(model, topology, facts, rules, pipeline=pipeline, expert_names=expert_names)
    plan = _ShardPlan(model, topology, facts, rules, cuts, places)
    homes, home_notes = plan.find_homes()
    convolution_notes = _convolution_notes(model, rules, version=version)
    notes = [*catalog.notes, *layout_notes, *convolution_notes, *home_notes]

    # Plan the files, rank by rank.
    args = _new_args(plan, pipeline, homes)
    top_level = _top_level_entries(plan, args, rng=rng)
    files = _plan_files(plan, homes, top_level, optimizer)
    dropped = [*catalog.dropped, *top_level.dropped]
    if optimizer is not None:
        files.extras.update(optimizer.beside)
        files.arrays.update(optimizer.arrays)
        notes += optimizer.notes
        dropped += optimizer.dropped

    # Put the target catalog together: the model's tensors first, then the optimizer's states.
    tensors = {
        key: catalog.tensors[key]
        for key in sorted(cuts, key=lambda key: split_state_key(key) is not None)
    }
    return replace(
        _target_catalog(plan, files, tensors),
        args=args,
        notes=tuple(notes),
        dropped=tuple(dropped),
    )


def _target_catalog(
    plan: _ShardPlan, files: _PlannedFiles, tensors: Mapping[str, Tensor]
) -> TargetCatalog:
    """Return the target catalog of planned files, without notes and arguments.

    Args:
        tensors: the source's tensors, states included, in the order of the target.
    """
    cuts, model, extras = plan.cuts, plan.model, files.extras
    rank_facts = RankFacts(
        ranks=files.ranks,
        planned=files.arrays
        | {array.name: array for copies in extras.values() for array in copies},
        optim_files={} if files.optimizer is None else files.optimizer.files,
        transposed=frozenset(key for key in tensors if cuts[key].is_transposed),
    )
    return Catalog(
        format="megatron",
        version=None,
        tensors={
            key: Tensor(
                tensor.dtype,
                cuts[key].target_shape,
                bind_argument(files.list_fragments, key),
                flexible=cuts[key].shape != tensor.shape,
                attributes=tensor.attributes,
            )
            for key, tensor in tensors.items()
        },
        objects={key: item for key, item in model.objects.items() if item.raw_key is None},
        hidden={
            key: whole_tensor(copies[0]).with_replicas(*map(whole_tensor, copies[1:]))
            for key, copies in extras.items()
        },
        iteration=model.iteration,
        write=model.write,
        facets={Topology: plan.topology, RankFacts: rank_facts},
    )


def _layout_notes(
    topology: Topology,
    facts: ModelFacts,
    pipeline: Pipeline,
    *,
    version: MegatronVersion | None,
) -> list[str]:
    """Return notes for the user about the layout.

    Raises:
        UnsupportedError: the megatron-core that is to load the files cannot run these sizes.
    """
    notes: list[str] = []
    notes += pipeline_notes(facts, pipeline)
    if version is not None:
        version.check_sizes(
            tp=topology.tp, n_groups=facts.n_groups, has_layout=pipeline.layout is not None
        )
    elif topology.tp > facts.n_groups:
        notes.append(
            f"TP {topology.tp} exceeds the number of query groups ({facts.n_groups}), so only "
            "megatron-core 0.16 and later can load the files"
        )
    return notes


def _convolution_notes(
    model: Catalog, rules: Rules, *, version: MegatronVersion | None
) -> list[str]:
    """Return the note that the source's megatron-core does not load Mamba's convolution.

    Raises:
        UnsupportedError: the megatron-core that is to load the files has other names.
    """
    newer = tuple(name for name, _ in rules.torch_dist_names)
    older = tuple(name for _, name in rules.torch_dist_names)
    subs = [layer.sub for layer in map(rules.layer_of, model.tensors) if layer is not None]
    is_newer = any(sub.startswith(newer) for sub in subs)
    if not is_newer and not any(sub.startswith(older) for sub in subs):
        return []

    # The other names also come in another order, by which an optimizer is numbered.
    if version is not None and version.has_direct_convolution != is_newer:
        name = "conv1d_weight" if is_newer else "conv1d.weight"
        raise UnsupportedError(
            f"Mamba's convolution is named {name} in these rank files, and megatron-core {version} "
            "cannot load this name",
            hint=f"use --to torch_dist, which megatron-core {version} can load",
        )
    if version is None and not is_newer and SINCE_0_19 in fields_of(model.args):
        note = (
            "the arguments are from megatron-core 0.19 or later, which cannot load Mamba's "
            "conv1d.weight from rank files; to continue with that version, use --to torch_dist"
        )
        return [note]
    return []


@dataclass(frozen=True, slots=True)
class _ShardPlan:
    """A model and its layout in the destination.

    Args:
        model: the global per-layer form, without the optimizer's states.
        topology: sizes of the destination.
        facts: facts about the source.
        rules: the layout's rules.
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
        """Form of the source's files; the defaults where the source is not Megatron's."""
        return self.model.facet(MegatronModel) or MegatronModel()

    def chunk_name(self, vp_rank: int) -> str:
        """Return the top-level entry of a chunk: ``model``, or ``model0`` … with several chunks."""
        return "model" if self.topology.vpp == 1 else f"model{vp_rank}"

    def find_homes(self) -> tuple[dict[str, list[Home]], list[str]]:
        """Return (key → the positions of all copies of the tensor in the files, notes)."""
        homes = {key: self.places.homes(key) for key in self.model.tensors}
        tied = tied_of(self.model, self.facts, self.rules) if self.topology.pp > 1 else None
        if tied is None:
            return homes, []

        # The output layer of the last stage is a copy of the embedding, which the first stage has.
        # The user needs to know only if the source, in one stage, has no such copy.
        head = self.facts.kind.head
        homes[tied].append(self.places.last(head))
        if self.facts.topology.pp > 1:
            return homes, []
        return homes, [f"{head} of the last stage is a copy of {tied}, because embeddings are tied"]

    def extra_states(self) -> dict[str, object]:
        """Return the extra states by global name.

        torch_dist has none of a GPT model's output layer. Rank files of a model whose other modules
        have an empty one have it, unless a value head is in its place.
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
            and not has_value_head(self.model.tensors)
        ):
            states.setdefault("output_layer._extra_state", None)
        return states


def _new_args(
    plan: _ShardPlan,
    pipeline: Pipeline,
    homes: Mapping[str, Sequence[Home]],
) -> object:
    """Return the training arguments for the sizes of the destination."""
    topology, rules, stages = plan.topology, plan.rules, plan.places.stages
    main_stack = plan.facts.kind.stacks[0]
    counts = [
        stages.count(main_stack, v, p) for v in range(topology.vpp) for p in range(topology.pp)
    ]

    # Every expert has parameters of its own in rank files, and so has every down projection unless
    # the model has a joined one: options of the source that join them must not stay.
    unset = ["moe_single_grouped_weight", "moe_single_grouped_bias"]
    if not any(".linear_qkv_down_proj." in key for key in plan.model.tensors):
        unset.append("mla_down_proj_fusion")
    return update_args(
        plan.model.args,
        topology=topology,
        pipeline=pipeline,
        counts=counts,
        padded_vocab_size=next(
            (
                plan.cuts[key].shape[0]
                for key in homes
                if rules.is_vocabulary(key, plan.cuts[key].shape)
            ),
            None,
        ),
        unset=unset,
    )


@dataclass(frozen=True, slots=True)
class _TopLevelEntries:
    """The top-level entries of the rank files.

    Args:
        names: names of all entries in the order of the files, ``model`` and ``optimizer`` included.
        common: entries that all ranks share.
        rng_states: rank → its random state; {} if none are kept.
        dropped: entries that are dropped, each with the reason.
    """

    names: Sequence[object]
    common: Mapping[object, object]
    rng_states: Mapping[Rank, object]
    dropped: Sequence[Dropped]

    def of(self, rank: Rank) -> Iterator[tuple[object, object]]:
        """Yield (name, value) of a rank's entries; None for ``model`` and ``optimizer``."""
        for name in self.names:
            if name in ("model", OPTIMIZER):
                yield name, None
            elif name == RNG:
                if rank in self.rng_states:
                    yield name, self.rng_states[rank]
            elif name in self.common:
                yield name, self.common[name]


def _top_level_entries(plan: _ShardPlan, args: object, *, rng: str | None) -> _TopLevelEntries:
    """Decide which top-level entries the rank files have.

    Raises:
        UnsupportedError: random states are to be kept, but cannot be.
    """
    # Entries that are built per rank or written only by torch_dist are not common.
    objects = plan.model.objects
    common = {
        name: value
        for name, value in get_common_state(plan.model).items()
        if name not in (CONTENT, OPTIMIZER, RERUN)
    }
    common["args"] = args

    # Keep the objects of single ranks only where they are random states of the same ranks.
    states = kept_states(plan.model, plan.facts.topology, plan.topology, rng=rng)
    dropped = list(states.dropped)
    reruns = [key for key in objects if key.startswith(f"{RERUN}_state/")]
    if get_common_state(plan.model).get(RERUN) is not None or reruns:
        dropped.append(Dropped((RERUN,), OF_RANKS))
    others = (
        key
        for key in objects
        if not key.startswith(f"{RNG}/") and key not in reruns and sharded_object(key) is not None
    )
    dropped += dropped_each(others, "cannot be stored in rank files")

    # The source's order comes first, then Megatron's usual one, then entries that neither names.
    names = dict.fromkeys([*(plan.megatron.top_level or ()), *TOP_LEVEL, *common])
    return _TopLevelEntries(tuple(names), common, states.by_rank, dropped)


@dataclass(frozen=True, slots=True)
class _PlannedChunk:
    """One model chunk of one rank's file.

    Args:
        name: top-level entry of the chunk.
        container: state dict of the chunk, whose tensors name the arrays.
        arrays: the arrays by name.
        parts: (name of an array, key of a tensor) → the array of that tensor alone, for arrays that
            join several.
        params: the tensors in the order of the file.
    """

    name: str
    container: object
    arrays: Mapping[str, PlannedArray | JoinedArray]
    parts: Mapping[tuple[str, str], PlannedArray]
    params: Sequence[HeldParam]


@dataclass(frozen=True, slots=True)
class _PlannedFiles:
    """The rank files to write.

    Args:
        plan: the model and its layout.
        homes: key → the positions of all copies of the tensor.
        optimizer: the optimizer's files, or None.
        ranks: coordinates → (directory, content of its file).
        arrays: the arrays of tensors by name.
        parts: ``_PlannedChunk.parts`` of all chunks.
        extras: key of a tensor outside of the model → the arrays that hold it.
        holders: (pipeline stage, expert parallel rank, or None for all) → the ranks there, with
            their directories.
    """

    plan: _ShardPlan
    homes: Mapping[str, Sequence[Home]]
    optimizer: OptimizerFiles | None
    ranks: dict[Coords, tuple[str, object]] = field(default_factory=dict)
    arrays: dict[str, PlannedArray | JoinedArray] = field(default_factory=dict)
    parts: dict[tuple[str, str], PlannedArray] = field(default_factory=dict)
    extras: dict[str, list[PlannedArray]] = field(default_factory=dict)
    holders: dict[tuple[int, int | None], list[tuple[Rank, str]]] = field(default_factory=dict)

    def list_fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the fragments of all copies of a tensor of the model, or of a state."""
        if key not in self.homes:
            return () if self.optimizer is None else self.optimizer.fragments(key)

        # A tensor of the model may be one of several in an array.
        fragments: list[TargetFragment] = []
        for home in self.homes[key]:
            chunk = self.plan.chunk_name(home.vp)
            for rank, folder in self.holders[home.pp, home.ep]:
                name = _array_name(folder, chunk, home.name)
                array = self.arrays[name]
                part = self.parts[name, key] if isinstance(array, JoinedArray) else array
                fragments += self.plan.cuts[key].fragments(key, rank, part)
        return tuple(fragments)


def _array_name(folder: str, chunk: str, name: str) -> str:
    """Return the name of the array of a tensor in a rank's file."""
    return f"{folder}:{chunk}.{name}"


def _plan_files(
    plan: _ShardPlan,
    homes: Mapping[str, Sequence[Home]],
    top_level: _TopLevelEntries,
    optimizer: OptimizerFiles | None,
) -> _PlannedFiles:
    """Plan the file of every rank, and add each rank's parameters to the optimizer's files."""
    # Group tensors, extra states and module versions by the chunks that hold them.
    states = plan.extra_states()
    entries = by_rank(_ordered_entries(plan, homes, states), plan.topology, plan.rules)
    versions = by_chunk(
        (version, home)
        for module, version in plan.megatron.module_versions.items()
        for home in plan.places.module(module)
    )

    files = _PlannedFiles(plan, homes, optimizer)
    weights = ValueCounter()
    for rank in plan.topology.ranks():
        coords, folder = plan.topology.coords(rank), rank_dir(plan.topology, rank)
        for ep_rank in (None, rank.ep):
            files.holders.setdefault((rank.pp, ep_rank), []).append((rank, folder))

        # Plan the chunks before the other entries, wherever they are in the file: the optimizer's
        # entry depends on their parameters.
        chunks: list[_PlannedChunk] = []
        for vp_rank in range(plan.topology.vpp):
            chunk = _plan_chunk(
                plan,
                rank,
                vp_rank,
                entries.get((vp_rank, rank.pp, rank.ep), ()),
                states=states,
                versions=versions.get((vp_rank, rank.pp), ()),
            )
            chunks.append(chunk)
            files.arrays.update(chunk.arrays)
            files.parts.update(chunk.parts)
        params = [param for chunk in chunks for param in chunk.params]

        # Put the entries into the order of the file.
        root: dict[object, object] = {}
        for name, value in top_level.of(rank):
            if name == "model":
                root |= {chunk.name: chunk.container for chunk in chunks}
            elif name == OPTIMIZER:
                if optimizer is not None:
                    root[name] = optimizer.add(rank, folder, coords, params)
            else:
                root[name], arrays = plan_entry(
                    plan.model, value, f"{folder}:{name}", coords, weights=weights
                )
                for key, array in arrays:
                    files.extras.setdefault(key, []).append(array)
        files.ranks[coords] = (folder, root)
    return files


def _ordered_entries(
    plan: _ShardPlan, homes: Mapping[str, Sequence[Home]], states: Mapping[str, object]
) -> list[tuple[str, Home]]:
    """Return (global name, position) of tensors and extra states, in the order of the files."""
    # Sort names by the source's files, or else by the order that Megatron's modules have.
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

    # A copy of the embedding is the weight of the output layer, and comes where that module does.
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
    versions: Iterable[tuple[object, Home]],
) -> _PlannedChunk:
    """Plan one model chunk of one rank's file.

    Args:
        names: (global name, name in the file) of its tensors and extra states, in order.
        states: extra states by global name.
        versions: (entry in torch's ``_metadata``, position) of the modules in this chunk.
    """
    folder, coords = rank_dir(plan.topology, rank), plan.topology.coords(rank)
    chunk = plan.chunk_name(vp_rank)
    tensors = plan.model.tensors

    # List the entries in the order of the file; one array may hold the tensors of several experts.
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

    # Plan the arrays.
    arrays: dict[str, PlannedArray | JoinedArray] = {}
    parts: dict[tuple[str, str], PlannedArray] = {}
    for name, keys in keys_of.items():
        array = arrays[name] = param_array(
            name, keys, tensors, plan.cuts, plan.rules, coords=coords
        )
        if isinstance(array, JoinedArray):
            parts |= {(name, key): part for key, (_, part) in zip(keys, array.parts, strict=True)}

    # Build the state dict as the source has it: nested or not, an OrderedDict with its modules'
    # versions or a plain dict.
    modules = {home.name: version for version, home in versions if home.has(rank)}
    # The names of a GPT model beside towers begin with its own in the complete model.
    wrapper = plan.rules.wrapper_in(plan.megatron.wrapper)
    if wrapper is not None:
        entries = {wrapper.wrapped(str(name)): leaf for name, leaf in entries.items()}
        complete = {wrapper.wrapped_module(module): item for module, item in modules.items()}
        modules = complete | ({wrapper.text.rstrip("."): modules[""]} if "" in modules else {})
    container = nested(entries, modules, {"": plan.megatron.is_ordered, **plan.megatron.nesting})
    return _PlannedChunk(chunk, container, arrays, parts, params)
