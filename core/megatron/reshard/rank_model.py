"""The rank files of a Megatron checkpoint as one model: what every rank holds, under its global name.

``core.megatron.reshard.from_ranks`` makes global tensors of it, ``core.megatron.reshard.rank_optimizer`` finds the
parameters' optimizer states by it.
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
from core.megatron.model.facts import Facts
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Rank, Topology
from core.megatron.optimizer.rank_state import Param, RankFile
from core.megatron.placement.chunk import Chunk, chunk_of
from core.megatron.placement.qkv_order import OldRows
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping


@value(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor."""

    rank: Rank
    folder: str
    array: StoredArray


@dataclass(slots=True)
class HeldTensor:
    """A global tensor under construction."""

    rule: Rule
    held: list[Held] = field(default_factory=list)
    old_rows: OldRows | None = None


@dataclass(slots=True)
class RankModel:
    """All chunks of all ranks, merged by name; ``order`` and ``module_order`` tell where names stand in the model."""

    tensors: dict[str, HeldTensor] = field(default_factory=dict)
    extra_states: dict[str, list[object]] = field(default_factory=dict)
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    module_order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expert_names: str | None = None
    files: dict[Rank, RankFile] = field(default_factory=dict)


def merged(
    catalog: Catalog,
    ranks: Mapping[Coords, tuple[str, object]],
    facts: Facts,
    rules: Rules,
    *,
    report: Report = raising,
) -> RankModel:
    """All chunks under global names, each name with its place in the whole model.

    Args:
        report: takes what is wrong (rules ``layout.ranks``, ``.chunks``, ``.names``, ``.layers``, ``.entries``), which
            is then left out; raises it, if none is given.
    """
    topology = facts.topology
    stages = facts.stages(topology.pp, topology.vpp)
    files = {topology.rank_at(coords): found for coords, found in ranks.items()}
    _check_ranks(files, topology, report)
    model = RankModel()
    for vp_rank in range(topology.vpp):
        heads: dict[int, tuple[Chunk, list[str], dict[str, tuple[int, int]]]] = {}
        for rank, (folder, root) in files.items():
            try:
                flat = flattened(chunk_of(root, vp_rank, vpp=topology.vpp, rank=folder), rank=folder)
            except CheckpointingException as err:
                report(err.breaking("layout.chunks"))
                continue
            model.nesting |= flat.nesting
            entries, local = flat.entries, list(flat.entries)
            where = (vp_rank, rank.pp)
            chunk = Chunk(folder, rank, where, stages, facts, rules)
            if rank.pp not in heads:
                heads[rank.pp] = (chunk, local, chunk.places(local))
                _check_layers(local, stages, where, rules, report, rank=folder)
            head, names, places = heads[rank.pp]
            chunk = replace(chunk, known=head.known)
            if local != names:
                _check_names(local, names, report, rank=folder, other=head.folder)
                places = chunk.places(local)
            params = [
                Param(chunk, name, _array(catalog, leaf))
                for name, leaf in entries.items()
                if isinstance(leaf, TensorLeaf)
            ]
            known = model.files.get(rank)
            held = (*(() if known is None else known.params), *params)
            model.files[rank] = RankFile(rank, folder, as_mapping(root) or {}, held)
            for name, leaf in entries.items():
                try:
                    _add(model, catalog, chunk, name, leaf, place=places[name])
                except CheckpointingException as err:
                    report(err.breaking("layout.entries"))
            _add_versions(model, chunk, flat.versions)
    if model.expert_names == "grouped":
        _add_expert_states(model, rules)
    if facts.kind.is_legacy and facts.is_tied:
        _add_head(model, facts)
    return model


def _add_head(model: RankModel, facts: Facts) -> None:
    """Notes what the dict of the embedding's copy looks like, which a single pipeline stage does not have."""
    head, embedding = (name.rpartition(".")[0] for name in (facts.kind.head, facts.kind.embedding))
    model.nesting.setdefault(head, model.nesting.get(embedding, True))
    if embedding in model.versions and head not in model.versions:
        model.versions[head] = model.versions[embedding]
        model.module_order[head] = max(model.module_order.values())


def _check_ranks(files: Iterable[Rank], topology: Topology, report: Report) -> None:
    """Every shard of what is cut over TP is in some file: older Megatron left out ranks whose experts another holds."""
    missing = sorted(set(range(topology.tp)) - {rank.tp for rank in files})
    if missing:
        error = MissingShardError(
            f"the shards of TP ranks {listed(missing)} are in no file: before core 0.19, Megatron did not save every "
            f"rank of {topology}",
            hint="save the model again with a newer Megatron-LM, or as torch_dist",
        )
        report(error.breaking("layout.ranks"))


def _add(model: RankModel, catalog: Catalog, chunk: Chunk, name: str, leaf: object, *, place: tuple[int, int]) -> None:
    """Puts one entry of a rank's state dict where it belongs; ``place`` is that of ``Chunk.places``."""
    expert = chunk.rules.expert_of(name)
    if expert is not None and expert.names != model.expert_names:
        if model.expert_names is not None:
            raise CorruptError(f"experts are both {model.expert_names} and {expert.names}", key=name, rank=chunk.folder)
        model.expert_names = expert.names
    if not isinstance(leaf, TensorLeaf):
        _add_state(model, chunk, name, leaf, place=place)
        return
    for number, whole, array in chunk.arrays(name, _array(catalog, leaf)):
        tensor = model.tensors.get(whole)
        rule = tensor.rule if tensor is not None else _rule_of(whole, catalog, leaf.key, chunk)
        if rule.tied is not None and chunk.facts.is_tied:
            tensor = model.tensors.get(rule.tied)
            if tensor is None:
                raise MissingShardError(
                    f"{name} is a copy of it, but it is not there", key=rule.tied, rank=chunk.folder
                )
        if tensor is None:
            tensor = model.tensors[whole] = HeldTensor(rule)
            model.order[whole] = (*chunk.where, place[0], number, place[1])
        tensor.held.append(Held(chunk.rank, chunk.folder, array))


def _array(catalog: Catalog, leaf: TensorLeaf) -> StoredArray:
    """The array of a rank's tensor."""
    ranks = catalog.facet(RankFacts)
    array = None if ranks is None or ranks.arrays is None else ranks.arrays.get(leaf.key)
    if array is None:
        array = catalog.fragments(leaf.key)[0].array
    assert array is not None
    return array


def _add_state(model: RankModel, chunk: Chunk, name: str, leaf: object, *, place: tuple[int, int]) -> None:
    """Puts an entry that is no tensor where it belongs."""
    rule = chunk.rules.rule_of(name)
    if rule.kind != "opaque":
        raise UnsupportedError(
            f"this entry is a {_class_of(leaf)}, not a plain tensor",
            key=name,
            rank=chunk.folder,
            hint="save the model once without quantized or otherwise special parameters",
        )
    is_packed = chunk.rules.is_packed_state(name)
    for number, whole in [(0, chunk.layer_name(name))] if is_packed else chunk.global_names(name):
        known = model.extra_states.setdefault(whole, [leaf])
        if not same(known[0], leaf):
            known.append(leaf)
        model.order.setdefault(whole, (*chunk.where, place[0], number, place[1]))


def _class_of(leaf: object) -> str:
    """What a pickle calls something: a tensor's subclass, else the function that makes it."""
    if not isinstance(leaf, Inert):
        return type(leaf).__name__
    classes = [str(part) for part in leaf.args if isinstance(part, Global)]
    return classes[-1] if classes else str(leaf.fn)


def _add_expert_states(model: RankModel, rules: Rules) -> None:
    """Gives legacy grouped experts, which have no extra states, the empty ones that the other modules have."""
    if not any(values[0] is None for values in model.extra_states.values()):
        return
    for name in model.tensors:
        expert = rules.expert_of(name)
        if expert is not None:
            state = f"{name.rpartition('.')[0]}.{EXTRA_STATE}"
            model.extra_states[state] = [None]
            model.order[state] = (*model.order[name], 1)


def _add_versions(model: RankModel, chunk: Chunk, versions: Mapping[str, object]) -> None:
    """Puts what torch notes about the modules of a rank where it belongs."""
    places = chunk.places([module + "." for module in versions])
    for module, version in versions.items():
        for number, whole in chunk.global_names(module + "."):
            name, place = whole[:-1], places[module + "."]
            model.versions.setdefault(name, version)
            model.module_order.setdefault(name, (*chunk.where, place[0], number, place[1]))


def _rule_of(name: str, catalog: Catalog, key: str, chunk: Chunk) -> Rule:
    """The rule of a tensor; an unknown one is reported with its shapes on all ranks."""
    rules, facts = chunk.rules, chunk.facts
    try:
        return rules.rule_of(name)
    except UnknownTensorError:
        path = key.partition(":")[2]
        shapes = [meta.shape for other, meta in catalog.tensors.items() if other.partition(":")[2] == path]
        return rules.rule_of(name, shapes=shapes, hidden_size=facts.hidden_size, tp=facts.topology.tp)


def _check_layers(
    names: Sequence[str], stages: Stages, where: tuple[int, int], rules: Rules, report: Report, *, rank: str
) -> None:
    """A chunk holds exactly the layers that its stage should."""
    held: dict[str, set[int]] = {stack: set() for stack in rules.stacks}
    for name in names:
        found = rules.layer_of(name)
        if found is not None:
            held[found.stack].add(found.number)
    for stack, layers in held.items():
        count = stages.count(stack, *where)
        missing = sorted(set(range(count)) - layers)
        if missing:
            what = f"layers {listed(missing)} of this stage's {count} are not there"
            report(MissingShardError(what, rank=rank, rule="layout.layers"))
        extra = sorted(layers - set(range(count)))
        if extra:
            what = f"layers {listed(extra)} are beyond the {count} that this stage should hold"
            report(CorruptError(what, rank=rank, rule="layout.layers"))


def _check_names(names: Sequence[str], others: Sequence[str], report: Report, *, rank: str, other: str) -> None:
    """Ranks of one stage hold the same names: experts are numbered anew in each."""
    missing, extra = sorted(set(others) - set(names)), sorted(set(names) - set(others))
    if missing:
        report(MissingShardError(f"{listed(missing)} is in {other}, but not here", rank=rank, rule="layout.names"))
    if extra:
        report(MissingShardError(f"{listed(extra)} is in {rank}, but not here", rank=other, rule="layout.names"))
