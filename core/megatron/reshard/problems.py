"""All problems with the layout of a Megatron checkpoint, not only the first.

``core.megatron.reshard.from_ranks`` and ``core.megatron.reshard.from_global`` stop at the first
problem; here the same checks report it and go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.stored import Coords
from core.changes.select import is_optimizer_key
from core.errors import CheckpointingException, CorruptError, MissingShardError, Report
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.model.args import facts_of
from core.megatron.model.checks import check_complete, check_shape, fc2_of
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import check_parts, with_sizes
from core.megatron.optimizer.rank_state import RankFile
from core.megatron.placement.joined import join_parts
from core.megatron.placement.origins import meta_of, origins_of
from core.megatron.reshard.from_global import (
    common_entries,
    is_random_state,
    numbered_names,
    prefix_of,
    without_prefix,
)
from core.megatron.reshard.from_ranks import global_shape_of, local_names, ranks_of, settle_rules
from core.megatron.reshard.partners import check_partners
from core.megatron.reshard.rank_model import RankModel, RankPart, RankTensor, merge_ranks
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import TensorLeaf, walk


@dataclass(frozen=True, slots=True)
class Understood:
    """A model as far as it is understood.

    Args:
        facts: the facts that the training arguments give.
        shapes: global per-layer name → shape, padding rows included.
        held: global name → what the ranks hold of the tensor, in rank files.
        files: what the ranks' files hold, in rank files.
    """

    facts: ModelFacts
    shapes: Mapping[str, Shape]
    held: Mapping[str, RankTensor] = field(default_factory=dict)
    files: Sequence[RankFile] = ()


def understood(
    catalog: Catalog, rules: Rules, *, report: Report, sample: Collection[str] | None = None
) -> Understood | None:
    """Read the model of a catalog with Megatron's names, as far as it is understood, and report its
    problems.

    Args:
        catalog: a catalog of rank files, which may be incomplete, or of global tensors, its objects
            loaded.
        report: takes the problems: the rules of ``merge_ranks``, ``origins_of`` and
            ``check_complete``, and ``layout.args``, ``.ranks_differ``, ``.shapes``, ``.tied``.
        sample: rank directories that stand for all others, which are like them; None for all.

    Returns:
        None if the arguments or the names are not understood.
    """
    try:
        if not catalog.is_rank_local:
            return _read_global(catalog, rules, report)
        return _read_ranks(catalog, rules, report, sample)
    except CheckpointingException as err:
        report(err.breaking("layout.args"))
        return None


def _read_ranks(
    catalog: Catalog, rules: Rules, report: Report, sample: Collection[str] | None
) -> Understood:
    """Read the model of rank files, and report its problems."""
    ranks = ranks_of(catalog)
    facts = facts_of(catalog.args, names=rules.model_of(local_names(ranks)))
    if sample is not None:
        facts, ranks = _sampled(facts, ranks, sample)

    def report_unless_sampled(error: CheckpointingException) -> None:
        if sample is None or error.rule != "layout.ranks":
            report(error)

    # Names first: all layers, all partners.
    model = merge_ranks(catalog, ranks, facts, rules, report=report_unless_sampled)
    check_complete(model.tensors, facts, rules, report=report)
    check_partners(model.tensors, facts.kind, rules, report=report)
    for name, tensor in model.tensors.items():
        tensor.parts = _agreeing_parts(name, tensor, report)
    for error in _missing_heads(model, facts):
        report(error)

    # Then shapes.
    settle_rules(model, facts)
    shapes: dict[str, Shape] = {}
    for name, tensor in model.tensors.items():
        try:
            shapes[name] = global_shape_of(name, tensor, facts.topology)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    rule_of = {name: tensor.rule for name, tensor in model.tensors.items()}
    facts = _check_shapes(shapes, rule_of, facts, rules, report)
    return Understood(facts, shapes, held=model.tensors, files=tuple(model.files.values()))


def _sampled(
    facts: ModelFacts, ranks: Mapping[Coords, tuple[str, object]], sample: Collection[str]
) -> tuple[ModelFacts, Mapping[Coords, tuple[str, object]]]:
    """Return the sampled ranks and the facts for them: the experts of one rank are taken for all
    that there are.
    """
    ep = facts.topology.ep
    sampled = {
        tuple(number for number in coords if number[0] != "ep"): file
        for coords, file in ranks.items()
        if file[0] in sample
    }
    if len(sampled) < len(sample):
        return facts, ranks  # expert parallel ranks differ among themselves, so all are needed
    if ep == 1:
        return facts, sampled
    n_experts = None if facts.n_experts is None else facts.n_experts // ep
    return replace(facts, topology=replace(facts.topology, ep=1), n_experts=n_experts), sampled


def _missing_heads(model: RankModel, facts: ModelFacts) -> Iterator[CheckpointingException]:
    """Yield an error for each rank of the last stage that lacks its copy of shared embeddings.

    Where predictions come after the last layer, the copy is for them to place.
    """
    last = facts.topology.pp - 1
    tied = model.tensors.get(facts.kind.embedding)
    if not facts.is_tied or last == 0 or facts.n_predictions or tied is None:
        return
    holders = {part.rank for part in tied.parts}
    for rank, file in model.files.items():
        if rank.pp == last and rank not in holders:
            problem = f"the last stage has no copy of {facts.kind.embedding}, which it shares"
            yield MissingShardError(
                problem, key=facts.kind.head, rank=file.folder, rule="layout.tied"
            )


def _agreeing_parts(name: str, tensor: RankTensor, report: Report) -> list[RankPart]:
    """Return the parts with the most usual dtype and shape, and report the others."""
    kinds = Counter((part.array.dtype, part.array.shape) for part in tensor.parts)
    if len(kinds) == 1:
        return tensor.parts
    usual, n = kinds.most_common(1)[0]
    for part in (
        tensor.parts if tensor.rule.kind != "opaque" else ()
    ):  # extra states are as long as each rank's pickle
        array = part.array
        if (array.dtype, array.shape) != usual:
            problem = f"{array.dtype} of shape {array.shape} here, {usual[0]} of {usual[1]} on {n} other ranks"
            report(CorruptError(problem, key=name, rank=part.folder, rule="layout.ranks_differ"))
    return [part for part in tensor.parts if (part.array.dtype, part.array.shape) == usual]


def _read_global(catalog: Catalog, rules: Rules, report: Report) -> Understood:
    """Read the model of a catalog of global tensors, and report its problems."""
    catalog = join_parts(catalog, rules)
    prefix = prefix_of(catalog, rules)
    common = common_entries(catalog)
    facts = facts_of(
        common.get("args"), names=rules.model_of(numbered_names(catalog, prefix, rules))
    )

    # Find every tensor's name and place.
    names: dict[str, str] = {}
    for key in _model_keys(catalog, common, prefix):
        try:
            names[key] = without_prefix(prefix, key)
        except CheckpointingException as err:
            report(err.breaking("layout.entries"))
    origins = origins_of(catalog, names, facts, rules, report=report)
    metas: dict[str, TensorMeta] = {}
    for name, origin in origins.items():
        try:
            metas[name] = meta_of(catalog, name, origin)
        except CheckpointingException as err:
            report(err.breaking("layout.tied"))

    check_complete(metas, facts, rules, report=report)
    check_partners(metas, facts.kind, rules, report=report)
    shapes = {name: meta.shape for name, meta in metas.items()}
    facts = _check_shapes(
        shapes, {name: rules.rule_of(name) for name in shapes}, facts, rules, report
    )
    return Understood(facts, shapes)


def _model_keys(catalog: Catalog, common: Mapping[object, object], prefix: str) -> Iterator[str]:
    """Yield the tensors of the model: neither of the optimizer, nor of other entries."""
    entries = [item for name, item in common.items() if name != OPTIMIZER]
    in_entries = {leaf.key for leaf in walk(entries) if isinstance(leaf, TensorLeaf)}
    for key in catalog.tensors:
        if (
            not is_optimizer_key(key)
            and key not in in_entries
            and not (prefix and is_random_state(key))
        ):
            yield key


def _check_shapes(
    shapes: Mapping[str, Shape],
    rule_of: Mapping[str, Rule],
    facts: ModelFacts,
    rules: Rules,
    report: Report,
) -> ModelFacts:
    """Compare shapes with the arguments and one another, reporting what does not fit.

    Returns:
        The facts, with the sizes that the shapes tell.
    """
    try:
        facts = with_sizes(facts, shapes, rules)
    except CheckpointingException as err:
        report(err.breaking("layout.shapes"))
    for name, shape in shapes.items():
        rule = rule_of[name]
        try:
            axis = rule.cut_axis
            if axis is not None and axis >= len(shape):
                raise CorruptError(
                    f"the tensor has {len(shape)} axes, but its rule cuts axis {axis}", key=name
                )
            check_shape(name, shape, shapes.get(fc2_of(name)), rule, facts)
            check_parts(rule, shape, facts, key=name)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    return facts
