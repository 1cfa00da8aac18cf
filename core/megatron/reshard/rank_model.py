"""The rank files of a Megatron checkpoint, merged into one model: what every rank holds, under its
global name.

``core.megatron.reshard.from_ranks`` makes global tensors of the result,
``core.megatron.reshard.rank_optimizer`` finds the parameters' optimizer states with its help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.arrays.fast_value import value
from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.catalog.stored import Coords, StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnknownTensorError,
    UnsupportedError,
    raising,
)
from core.megatron.extras.common_state import EXTRA_STATE, same
from core.megatron.extras.nested_dicts import flattened
from core.megatron.model.checks import listed
from core.megatron.model.facts import ModelFacts
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Rank, Topology
from core.megatron.optimizer.rank_state import Param, RankFile
from core.megatron.placement.chunk import ModelChunk, chunk_of
from core.megatron.placement.qkv_order import OldRows
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping


@value(frozen=True, slots=True)
class RankPart:
    """The part of a tensor that one rank holds."""

    rank: Rank
    folder: str
    array: StoredArray


@dataclass(slots=True)
class RankTensor:
    """A global tensor under construction, put together from the parts of the ranks."""

    rule: Rule
    parts: list[RankPart] = field(default_factory=list)
    old_rows: OldRows | None = None


@dataclass(slots=True)
class RankModel:
    """All chunks of all ranks, merged by name.

    Args:
        tensors: global name → what the ranks hold of the tensor.
        extra_states: global name → the values of ranks that differ; usually one.
        order: global name → place of the tensor or extra state in the model, for sorting.
        versions: module → what torch notes about it.
        nesting: name → whether its container is an OrderedDict.
        module_order: module → its place in the model, for sorting.
        expert_names: how the files name experts, or None without experts.
        files: what the file of each rank holds.
    """

    tensors: dict[str, RankTensor] = field(default_factory=dict)
    extra_states: dict[str, list[object]] = field(default_factory=dict)
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    module_order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expert_names: str | None = None
    files: dict[Rank, RankFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _StageHead:
    """The first rank of a pipeline stage, whose names the others repeat.

    Args:
        chunk: model chunk of the tensor.
        names: the names in it, in order.
        places: the result of ``ModelChunk.places``.
    """

    chunk: ModelChunk
    names: list[str]
    places: dict[str, tuple[int, int]]


def merge_ranks(
    catalog: Catalog,
    ranks: Mapping[Coords, tuple[str, object]],
    facts: ModelFacts,
    rules: Rules,
    *,
    report: Report = raising,
) -> RankModel:
    """Merge the chunks of all ranks under global names, each name with its place in the model.

    Args:
        report: takes the problems (rules ``layout.ranks``, ``.chunks``, ``.names``, ``.layers``,
            ``.entries``), whose subjects are then left out; raises them, if none is given.
    """
    topology = facts.topology
    stages = facts.stages(topology.pp, topology.vpp)
    files = {topology.rank_at(coords): file for coords, file in ranks.items()}
    _check_ranks(files, topology, report)
    model = RankModel()
    for vp_rank in range(topology.vpp):
        heads: dict[int, _StageHead] = {}
        for rank, (folder, root) in files.items():
            try:
                flat = flattened(
                    chunk_of(root, vp_rank, vpp=topology.vpp, rank=folder), rank=folder
                )
            except CheckpointingException as err:
                report(err.breaking("layout.chunks"))
                continue
            model.nesting |= flat.nesting

            # Only the first rank of a stage is looked at closely; the others repeat its names.
            chunk = ModelChunk(folder, rank, (vp_rank, rank.pp), stages, facts, rules)
            names = list(flat.entries)
            if rank.pp not in heads:
                heads[rank.pp] = _StageHead(chunk, names, chunk.places(names))
                _check_layers(names, stages, chunk.where, rules, report, rank=folder)
            head = heads[rank.pp]
            chunk = replace(chunk, known=head.chunk.known)
            places = head.places
            if names != head.names:
                _check_names(names, head.names, report, rank=folder, other=head.chunk.folder)
                places = chunk.places(names)

            _add_file(model, catalog, chunk, root, flat.entries)
            for name, leaf in flat.entries.items():
                try:
                    _add_entry(model, catalog, chunk, name, leaf, place=places[name])
                except CheckpointingException as err:
                    report(err.breaking("layout.entries"))
            _add_versions(model, chunk, flat.versions)
    if model.expert_names == "grouped":
        _add_expert_states(model, rules)
    if facts.kind.is_legacy and facts.is_tied:
        _add_head(model, facts)
    return model


def _add_file(
    model: RankModel,
    catalog: Catalog,
    chunk: ModelChunk,
    root: object,
    entries: Mapping[str, object],
) -> None:
    """Add the tensors of a chunk to what is known of its rank's file."""
    params = [
        Param(chunk, name, _array(catalog, leaf))
        for name, leaf in entries.items()
        if isinstance(leaf, TensorLeaf)
    ]
    file = model.files.get(chunk.rank)
    previous = () if file is None else file.params
    model.files[chunk.rank] = RankFile(
        chunk.rank, chunk.folder, as_mapping(root) or {}, (*previous, *params)
    )


def _add_head(model: RankModel, facts: ModelFacts) -> None:
    """Add what the dict of the embedding's copy looks like, which a single pipeline stage does not
    have.
    """
    head, embedding = (name.rpartition(".")[0] for name in (facts.kind.head, facts.kind.embedding))
    model.nesting.setdefault(head, model.nesting.get(embedding, True))
    if embedding in model.versions and head not in model.versions:
        model.versions[head] = model.versions[embedding]
        model.module_order[head] = max(model.module_order.values())


def _check_ranks(files: Iterable[Rank], topology: Topology, report: Report) -> None:
    """Report TP ranks whose shards are in no file: older Megatron left out ranks whose experts
    another one holds.
    """
    missing = sorted(set(range(topology.tp)) - {rank.tp for rank in files})
    if missing:
        error = MissingShardError(
            f"the shards of TP ranks {listed(missing)} are in no file: before core 0.19, Megatron did not save every "
            f"rank of {topology}",
            hint="save the model again with a newer Megatron-LM, or as torch_dist",
        )
        report(error.breaking("layout.ranks"))


def _add_entry(
    model: RankModel,
    catalog: Catalog,
    chunk: ModelChunk,
    name: str,
    leaf: object,
    *,
    place: tuple[int, int],
) -> None:
    """Add one entry of a rank's state dict to the model.

    Args:
        place: place of the entry, as returned by ``ModelChunk.places``.

    Raises:
        CorruptError: experts are named in two ways.
        MissingShardError: a copy of shared embeddings without its original.
        UnknownTensorError, UnsupportedError: as for ``Rules.rule_of``.
    """
    expert = chunk.rules.expert_of(name)
    if expert is not None and expert.names != model.expert_names:
        if model.expert_names is not None:
            raise CorruptError(
                f"experts are both {model.expert_names} and {expert.names}",
                key=name,
                rank=chunk.folder,
            )
        model.expert_names = expert.names
    if not isinstance(leaf, TensorLeaf):
        _add_state(model, chunk, name, leaf, place=place)
        return

    # A copy of shared embeddings is another part of the original.
    for number, global_name, array in chunk.arrays(name, _array(catalog, leaf)):
        tensor = model.tensors.get(global_name)
        rule = (
            tensor.rule if tensor is not None else _rule_of(global_name, catalog, leaf.key, chunk)
        )
        if rule.tied is not None and chunk.facts.is_tied:
            tensor = model.tensors.get(rule.tied)
            if tensor is None:
                raise MissingShardError(
                    f"{name} is a copy of this tensor, which is missing",
                    key=rule.tied,
                    rank=chunk.folder,
                )
        if tensor is None:
            tensor = model.tensors[global_name] = RankTensor(rule)
            model.order[global_name] = (*chunk.where, place[0], number, place[1])
        tensor.parts.append(RankPart(chunk.rank, chunk.folder, array))


def _array(catalog: Catalog, leaf: TensorLeaf) -> StoredArray:
    ranks = catalog.facet(RankFacts)
    array = None if ranks is None or ranks.arrays is None else ranks.arrays.get(leaf.key)
    if array is None:
        array = catalog.fragments(leaf.key)[0].array
    assert array is not None
    return array


def _add_state(
    model: RankModel, chunk: ModelChunk, name: str, leaf: object, *, place: tuple[int, int]
) -> None:
    """Add an entry that is not a tensor to the model's extra states.

    Raises:
        UnsupportedError: the entry is not an extra state.
    """
    rule = chunk.rules.rule_of(name)
    if rule.kind != "opaque":
        raise UnsupportedError(
            f"this entry is a {_class_of(leaf)}, not a plain tensor",
            key=name,
            rank=chunk.folder,
            hint="save the model once without quantized or otherwise special parameters",
        )
    is_packed = chunk.rules.is_packed_state(name)
    for number, global_name in (
        [(0, chunk.layer_name(name))] if is_packed else chunk.global_names(name)
    ):
        values = model.extra_states.setdefault(global_name, [leaf])
        if not same(values[0], leaf):
            values.append(leaf)
        model.order.setdefault(global_name, (*chunk.where, place[0], number, place[1]))


def _class_of(leaf: object) -> str:
    """Return a pickle's word for a value: a tensor's subclass, else the function that makes the
    value.
    """
    if not isinstance(leaf, Inert):
        return type(leaf).__name__
    classes = [str(part) for part in leaf.args if isinstance(part, Global)]
    return classes[-1] if classes else str(leaf.fn)


def _add_expert_states(model: RankModel, rules: Rules) -> None:
    """Give legacy grouped experts, which have no extra states, the empty ones that the other
    modules have.
    """
    if not any(values[0] is None for values in model.extra_states.values()):
        return
    for name in model.tensors:
        expert = rules.expert_of(name)
        if expert is not None:
            state = f"{name.rpartition('.')[0]}.{EXTRA_STATE}"
            model.extra_states[state] = [None]
            model.order[state] = (*model.order[name], 1)


def _add_versions(model: RankModel, chunk: ModelChunk, versions: Mapping[str, object]) -> None:
    """Add what torch notes about the modules of a chunk."""
    places = chunk.places([module + "." for module in versions])
    for module, version in versions.items():
        for number, global_name in chunk.global_names(module + "."):
            name, place = global_name[:-1], places[module + "."]
            model.versions.setdefault(name, version)
            model.module_order.setdefault(name, (*chunk.where, place[0], number, place[1]))


def _rule_of(name: str, catalog: Catalog, key: str, chunk: ModelChunk) -> Rule:
    """Return the rule of a tensor; the error of an unknown one lists its shapes on all ranks."""
    rules, facts = chunk.rules, chunk.facts
    try:
        return rules.rule_of(name)
    except UnknownTensorError:
        path = key.partition(":")[2]
        shapes = [
            meta.shape for other, meta in catalog.tensors.items() if other.partition(":")[2] == path
        ]
        return rules.rule_of(
            name, shapes=shapes, hidden_size=facts.hidden_size, tp=facts.topology.tp
        )


def _check_layers(
    names: Sequence[str],
    stages: Stages,
    where: tuple[int, int],
    rules: Rules,
    report: Report,
    *,
    rank: str,
) -> None:
    """Report layers that a chunk lacks, and layers beyond those of its stage."""
    layers_of: dict[str, set[int]] = {stack: set() for stack in rules.stacks}
    for name in names:
        layer = rules.layer_of(name)
        if layer is not None:
            layers_of[layer.stack].add(layer.number)
    for stack, layers in layers_of.items():
        count = stages.count(stack, *where)
        missing = sorted(set(range(count)) - layers)
        if missing:
            problem = f"layers {listed(missing)} of this stage's {count} are missing"
            report(MissingShardError(problem, rank=rank, rule="layout.layers"))
        extra = sorted(layers - set(range(count)))
        if extra:
            problem = f"layers {listed(extra)} are beyond the {count} that this stage should hold"
            report(CorruptError(problem, rank=rank, rule="layout.layers"))


def _check_names(
    names: Sequence[str], other_names: Sequence[str], report: Report, *, rank: str, other: str
) -> None:
    """Report names that only one of two ranks of a stage has (experts are numbered anew in
    each).
    """
    missing, extra = sorted(set(other_names) - set(names)), sorted(set(names) - set(other_names))
    if missing:
        report(
            MissingShardError(
                f"{listed(missing)} is in {other}, but not here", rank=rank, rule="layout.names"
            )
        )
    if extra:
        report(
            MissingShardError(
                f"{listed(extra)} is in {rank}, but not here", rank=other, rule="layout.names"
            )
        )
