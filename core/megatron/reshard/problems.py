"""Everything that is wrong with the layout of a Megatron checkpoint, not only the first of it.

``core.megatron.reshard.from_ranks`` and ``core.megatron.reshard.from_global`` stop where these go on; the functions
that find what is wrong are the same.
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
from core.megatron.model.facts import Facts
from core.megatron.model.parts import check_parts, with_sizes
from core.megatron.optimizer.rank_state import RankFile
from core.megatron.placement.joined import joined
from core.megatron.placement.origins import meta_of, origins_of
from core.megatron.reshard.from_global import common_entries, is_random_state, numbered_names, prefix_of, without_prefix
from core.megatron.reshard.from_ranks import checked_shape, local_names, ranks_of, settle_rules
from core.megatron.reshard.partners import check_partners
from core.megatron.reshard.rank_model import Held, HeldTensor, RankModel, merged
from core.megatron.rules.rules import Rule, Rules
from core.pickle.inert import TensorLeaf, walk


@dataclass(frozen=True, slots=True)
class Understood:
    """A model as far as it is understood.

    Args:
        facts: what the training arguments say.
        shapes: global per-layer name → shape, padding rows included.
        held: what the ranks hold of each, in rank files.
        files: what the ranks' files hold, in rank files.
    """

    facts: Facts
    shapes: Mapping[str, Shape]
    held: Mapping[str, HeldTensor] = field(default_factory=dict)
    files: Sequence[RankFile] = ()


def understood(
    catalog: Catalog, rules: Rules, *, report: Report, sample: Collection[str] | None = None
) -> Understood | None:
    """The model of a catalog with Megatron's names, as far as it is understood.

    Args:
        catalog: of rank files, which may be incomplete, or of global tensors, its objects loaded.
        report: takes what is wrong: the rules of ``merged``, ``origins_of`` and ``check_complete``, and
            ``layout.args``, ``.ranks_differ``, ``.shapes``, ``.tied``.
        sample: rank directories that stand for all others, which are like them; None for all.
    """
    try:
        if not catalog.is_rank_local:
            return _global(catalog, rules, report)
        return _ranks(catalog, rules, report, sample)
    except CheckpointingException as err:
        report(err.breaking("layout.args"))
        return None


def _ranks(catalog: Catalog, rules: Rules, report: Report, sample: Collection[str] | None) -> Understood:
    ranks = ranks_of(catalog)
    facts = facts_of(catalog.args, names=rules.model_of(local_names(ranks)))
    if sample is not None:
        facts, ranks = _sampled(facts, ranks, sample)

    def told(error: CheckpointingException) -> None:
        if sample is None or error.rule != "layout.ranks":
            report(error)

    model = merged(catalog, ranks, facts, rules, report=told)
    check_complete(model.tensors, facts, rules, report=report)
    check_partners(model.tensors, facts.kind, rules, report=report)
    shapes: dict[str, Shape] = {}
    for name, tensor in model.tensors.items():
        tensor.held = _alike(name, tensor, report)
    for error in _absent_heads(model, facts):
        report(error)
    settle_rules(model, facts)
    for name, tensor in model.tensors.items():
        try:
            shapes[name] = checked_shape(name, tensor, facts.topology)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    facts = _checked(shapes, {name: tensor.rule for name, tensor in model.tensors.items()}, facts, rules, report)
    return Understood(facts, shapes, held=model.tensors, files=tuple(model.files.values()))


def _sampled(
    facts: Facts, ranks: Mapping[Coords, tuple[str, object]], sample: Collection[str]
) -> tuple[Facts, Mapping[Coords, tuple[str, object]]]:
    """Some ranks, and the facts for them: those of one expert parallel rank are seen as all experts that there are."""
    ep = facts.topology.ep
    kept = {
        tuple(number for number in coords if number[0] != "ep"): found
        for coords, found in ranks.items()
        if found[0] in sample
    }
    if len(kept) < len(sample):
        return facts, ranks  # expert parallel ranks differ among themselves, so all are needed
    if ep == 1:
        return facts, kept
    n_experts = None if facts.n_experts is None else facts.n_experts // ep
    return replace(facts, topology=replace(facts.topology, ep=1), n_experts=n_experts), kept


def _absent_heads(model: RankModel, facts: Facts) -> Iterator[CheckpointingException]:
    """The ranks of the last of several stages that lack the copy of shared embeddings, by which they make their output.

    Where predictions come after the last layer, the copy is for them to place.
    """
    last = facts.topology.pp - 1
    tied = model.tensors.get(facts.kind.embedding)
    if not facts.is_tied or last == 0 or facts.n_predictions or tied is None:
        return
    holders = {held.rank for held in tied.held}
    for rank, file in model.files.items():
        if rank.pp == last and rank not in holders:
            what = f"the last stage has no copy of {facts.kind.embedding}, which it shares"
            yield MissingShardError(what, key=facts.kind.head, rank=file.folder, rule="layout.tied")


def _alike(name: str, tensor: HeldTensor, report: Report) -> list[Held]:
    """What those ranks hold that agree with most about dtype and shape; the others are reported."""
    looks = Counter((held.array.dtype, held.array.shape) for held in tensor.held)
    if len(looks) == 1:
        return tensor.held
    usual, n = looks.most_common(1)[0]
    for held in tensor.held if tensor.rule.kind != "opaque" else ():  # extra states are as long as each rank's pickle
        if (held.array.dtype, held.array.shape) != usual:
            what = f"{held.array.dtype} of shape {held.array.shape} here, {usual[0]} of {usual[1]} on {n} other ranks"
            report(CorruptError(what, key=name, rank=held.folder, rule="layout.ranks_differ"))
    return [held for held in tensor.held if (held.array.dtype, held.array.shape) == usual]


def _global(catalog: Catalog, rules: Rules, report: Report) -> Understood:
    catalog = joined(catalog, rules)
    prefix = prefix_of(catalog, rules)
    common = common_entries(catalog)
    facts = facts_of(common.get("args"), names=rules.model_of(numbered_names(catalog, prefix, rules)))
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
    facts = _checked(shapes, {name: rules.rule_of(name) for name in shapes}, facts, rules, report)
    return Understood(facts, shapes)


def _model_keys(catalog: Catalog, common: Mapping[object, object], prefix: str) -> Iterator[str]:
    """The tensors of the model: neither of the optimizer, nor of what stands beside."""
    rest = [item for name, item in common.items() if name != OPTIMIZER]
    beside = {leaf.key for leaf in walk(rest) if isinstance(leaf, TensorLeaf)}
    for key in catalog.tensors:
        if not is_optimizer_key(key) and key not in beside and not (prefix and is_random_state(key)):
            yield key


def _checked(
    shapes: Mapping[str, Shape], rule_of: Mapping[str, Rule], facts: Facts, rules: Rules, report: Report
) -> Facts:
    """Compares shapes with the arguments and one another; returns the facts with the sizes that they tell."""
    try:
        facts = with_sizes(facts, shapes, rules)
    except CheckpointingException as err:
        report(err.breaking("layout.shapes"))
    for name, shape in shapes.items():
        rule = rule_of[name]
        try:
            axis = rule.cut_axis
            if axis is not None and axis >= len(shape):
                raise CorruptError(f"the tensor has {len(shape)} axes, but its rule cuts axis {axis}", key=name)
            check_shape(name, shape, shapes.get(fc2_of(name)), rule, facts)
            check_parts(rule, shape, facts, key=name)
        except CheckpointingException as err:
            report(err.breaking("layout.shapes"))
    return facts
