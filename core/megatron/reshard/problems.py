"""Find all problems with the layout of a Megatron checkpoint, not only the first.

``core.megatron.reshard.from_ranks`` and ``core.megatron.reshard.from_global`` raise at the first
problem; here the same checks report it and go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.stored import Coords
from core.engine.catalog.tensor import Tensor
from core.errors import CheckpointingException, CorruptError, MissingShardError, Report
from core.files.store import ReadStore
from core.megatron.extras.common_state import OPTIMIZER, common_entries
from core.megatron.model.args import parse_facts
from core.megatron.model.checks import check_complete, check_shapes
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import check_parts, with_sizes
from core.megatron.reshard.equal_shards import (
    EqualShards,
    find_equal_shards,
    kind_of,
    one_of_each_kind,
)
from core.megatron.reshard.from_ranks import facts_of_ranks, global_shape_of, ranks_of, settle_rules
from core.megatron.reshard.partners import check_partners
from core.megatron.reshard.rank_model import RankModel, RankPart, RankTensor, merge_ranks
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import TensorLeaf, walk
from core.values import dataclass

if TYPE_CHECKING:
    from core.megatron.optimizer.rank_state import RankFile


@dataclass(frozen=True, slots=True)
class Understood:
    """The readable part of a model whose checkpoint may have problems.

    Args:
        facts: facts about the model, from its training arguments and shapes.
        shapes: global per-layer name → shape, padding rows included.
        held: global name → the shards of the tensor on all ranks; {} for global tensors.
        files: the parameters of each rank's file; () for global tensors.
        equal: tensors whose shards are equal although a rule cuts them; their shapes are those of
            the complete tensors that all ranks hold.
    """

    facts: ModelFacts
    shapes: Mapping[str, Shape]
    held: Mapping[str, RankTensor] = field(default_factory=dict)
    files: Sequence[RankFile] = ()
    equal: Sequence[EqualShards] = ()


def understood(
    catalog: Catalog,
    rules: Rules,
    store: ReadStore,
    *,
    report: Report,
    sample: Collection[str] | None = None,
    is_quick: bool = False,
) -> Understood | None:
    """Read the model of a catalog with Megatron's names, and report its problems.

    Args:
        catalog: a catalog of rank files, which may be incomplete, or of global tensors; its objects
            are loaded.
        store: the checkpoint's files.
        report: takes the problems: the rules of ``merge_ranks``, ``origins_of`` and
            ``check_complete``, and ``layout.args``, ``.ranks_differ``, ``.shapes``, ``.tied``.
        sample: the rank directories to read, which represent all others; None reads every rank.
        is_quick: compare the shards of one tensor of each kind only.

    Returns:
        The readable part of the model; None if its arguments or names are not understood.
    """
    try:
        if not catalog.is_rank_local:
            return _understand_global(catalog, rules, report)
        return _understand_ranks(catalog, rules, store, report, sample, is_quick=is_quick)
    except CheckpointingException as err:
        report(err.breaking("layout.args"))
        return None


def _understand_ranks(
    catalog: Catalog,
    rules: Rules,
    store: ReadStore,
    report: Report,
    sample: Collection[str] | None,
    *,
    is_quick: bool,
) -> Understood:
    """Read the model of rank files, and report its problems."""
    ranks = ranks_of(catalog)
    facts = facts_of_ranks(catalog.args, ranks, rules)
    if sample is not None:
        facts, ranks = _sampled(facts, ranks, sample)

    # In a sample, ranks are missing on purpose.
    def report_unless_sampled(error: CheckpointingException) -> None:
        if sample is None or error.rule != "layout.ranks":
            report(error)

    # Check the names first: every layer, every partner.
    model = merge_ranks(catalog, ranks, facts, rules, report=report_unless_sampled)
    check_complete(model.metas(), facts, rules, report=report)
    check_partners(model.tensors, facts.kind, rules, report=report)
    for name, tensor in model.tensors.items():
        tensor.parts = _agreeing_parts(name, tensor, report)
    for error in _missing_heads(model, facts):
        report(error)

    # Then check the shapes, which are known only for names that have a rule.
    settle_rules(model, facts)
    topology, tensors = facts.topology, model.tensors
    equal: list[EqualShards] = []
    with suppress(CheckpointingException):  # the checks of files report what cannot be read
        if is_quick:
            tensors = one_of_each_kind(tensors, catalog, topology)
        equal += find_equal_shards(tensors, topology, store)
    complete = {item.name for item in equal if item.is_on_all_ranks}
    kinds = {kind_of(name) for name in complete} if is_quick else frozenset()
    shapes: dict[str, Shape] = {}
    for name, tensor in model.tensors.items():
        try:
            # A complete tensor is judged as it is, not as many times as there are ranks.
            is_complete = name in complete or kind_of(name) in kinds
            shape = tensor.parts[0].array.shape if is_complete else None
            shapes[name] = shape or global_shape_of(name, tensor, topology)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    rule_of = {name: tensor.rule for name, tensor in model.tensors.items()}
    facts = _check_shapes(shapes, rule_of, facts, rules, report, n_joined=topology.size_of)
    files = tuple(model.files.values())
    return Understood(facts, shapes, held=model.tensors, files=files, equal=tuple(equal))


def _sampled(
    facts: ModelFacts, ranks: Mapping[Coords, tuple[str, object]], sample: Collection[str]
) -> tuple[ModelFacts, Mapping[Coords, tuple[str, object]]]:
    """Return the sampled ranks, and the facts about a model that has no other experts than theirs.

    All ranks are returned where the sample has several expert parallel ranks of one (TP, PP) rank.
    """
    # Without EP coordinates, the ranks of a sample are those of a smaller model at EP 1.
    ep = facts.topology.ep
    sampled = {
        tuple(number for number in coords if number[0] != "ep"): file
        for coords, file in ranks.items()
        if file[0] in sample
    }

    # Expert parallel ranks that differ coincide now; then all of them have to be read.
    if len(sampled) < len(sample):
        return facts, ranks
    if ep == 1:
        return facts, sampled
    n_experts = None if facts.n_experts is None else facts.n_experts // ep
    return replace(facts, topology=replace(facts.topology, ep=1), n_experts=n_experts), sampled


def _missing_heads(model: RankModel, facts: ModelFacts) -> Iterator[CheckpointingException]:
    """Yield an error for each rank of the last stage that lacks its copy of tied embeddings.

    With multi-token prediction the copy may be in another stage, so it is not checked.
    """
    topology = facts.topology
    last = facts.stages(topology.pp, topology.vpp).chunk_at("last")[1]
    tied = model.tensors.get(facts.kind.embedding)
    if not facts.is_tied or topology.pp == 1 or facts.n_predictions or tied is None:
        return
    holders = {part.rank for part in tied.parts}
    for rank, file in model.files.items():
        if rank.pp == last and rank not in holders:
            yield MissingShardError(
                f"the last stage has no copy of the tied embeddings, {facts.kind.embedding}",
                key=facts.kind.head,
                rank=file.folder,
                rule="layout.tied",
            )


def _agreeing_parts(name: str, tensor: RankTensor, report: Report) -> list[RankPart]:
    """Return the parts with the most common dtype and shape, and report the others."""
    kinds = Counter((part.array.dtype, part.array.shape) for part in tensor.parts)
    (dtype, shape), n = kinds.most_common(1)[0]
    usual_parts = [p for p in tensor.parts if (p.array.dtype, p.array.shape) == (dtype, shape)]

    # The length of an extra state is that of each rank's pickle, so it may differ.
    if len(usual_parts) == len(tensor.parts) or tensor.rule.kind == "opaque":
        return usual_parts
    for part in tensor.parts:
        array = part.array
        if (array.dtype, array.shape) != (dtype, shape):
            report(
                CorruptError(
                    f"the tensor is {array.dtype} of shape {array.shape} here, but {dtype} of "
                    f"shape {shape} on {n} other rank{'s' if n > 1 else ''}",
                    key=name,
                    rank=part.folder,
                    rule="layout.ranks_differ",
                )
            )
    return usual_parts


def _understand_global(catalog: Catalog, rules: Rules, report: Report) -> Understood:
    """Read the model of a catalog of global tensors, and report its problems."""
    from core.megatron.placement.fsdp_dtensor import from_fsdp_dtensor
    from core.megatron.placement.joined import join_parts
    from core.megatron.placement.origins import meta_of, origins_of, with_stacked_tower
    from core.megatron.reshard.from_global import is_random_state
    from core.megatron.rules.prefixes import numbered_names, prefix_of, without_prefix

    catalog = join_parts(from_fsdp_dtensor(catalog, carries_optimizer=False), rules)
    prefix = prefix_of(catalog, rules)
    common = common_entries(catalog)
    facts = parse_facts(
        common.get("args"), names=rules.model_of(numbered_names(catalog, prefix, rules))
    )

    # Select the model's tensors: not those of the optimizer, of other entries, or, in the file of
    # a single rank, of its random state.
    entries = [item for name, item in common.items() if name != OPTIMIZER]
    in_entries = {leaf.key for leaf in walk(entries) if isinstance(leaf, TensorLeaf)}
    names: dict[str, str] = {}
    for key in catalog.tensors:
        if is_optimizer_key(key) or key in in_entries or (prefix and is_random_state(key)):
            continue
        try:
            names[key] = without_prefix(prefix, key, rules)
        except CheckpointingException as err:
            report(err.breaking("layout.entries"))

    # Find the per-layer tensors in the stored ones.
    facts = with_stacked_tower(facts, catalog, names)
    origins = origins_of(catalog, names, facts, rules, report=report)
    tensors: dict[str, Tensor] = {}
    for name, origin in origins.items():
        try:
            tensors[name] = meta_of(catalog, name, origin)
        except CheckpointingException as err:
            report(err.breaking("layout.tied"))

    # Check names and shapes.
    check_complete(tensors, facts, rules, report=report)
    check_partners(tensors, facts.kind, rules, report=report)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    facts = _check_shapes(
        shapes, {name: rules.rule_of(name) for name in shapes}, facts, rules, report
    )
    return Understood(facts, shapes)


def _check_shapes(
    shapes: Mapping[str, Shape],
    rule_of: Mapping[str, Rule],
    facts: ModelFacts,
    rules: Rules,
    report: Report,
    *,
    n_joined: Callable[[str], int] = lambda group: 1,
) -> ModelFacts:
    """Compare shapes with the arguments and with one another, and report mismatches.

    Returns:
        The facts, with the sizes that only shapes show.
    """
    try:
        facts = with_sizes(facts, shapes, rules)
    except CheckpointingException as err:
        report(err.breaking("layout.shapes"))
    check_shapes(shapes, rule_of, facts, n_joined=n_joined, report=report)
    for name, shape in shapes.items():
        try:
            check_parts(rule_of[name], shape, facts, key=name)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    return facts
