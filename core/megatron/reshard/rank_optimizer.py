"""Optimizer state in rank files, in either of Megatron-LM's two forms.

``core.megatron.optimizer.numbered`` reads and writes the FP32 and Float16 optimizers, which are
stored in model_optim_rng.pt; ``core.megatron.optimizer.flat`` the distributed optimizer, which is
stored in distrib_optim.pt. The functions here choose between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.errors import Report, UnsupportedError, raising
from core.files.store import ReadStore
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.rank_state import OptimizerFiles, RankFile, RankStates
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import Rules


def find_rank_states(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: ModelFacts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """Find which stored array of a rank is which optimizer state of which parameter.

    Args:
        catalog: a rank catalog (``core.formats.megatron.format``) with an optimizer.
        files: the parameters of every rank.
        store: the checkpoint's files, to compare master weights with weights; None skips the
            comparison.
        report: takes the problems of single ranks (rules ``optim.numbers``, ``.groups``,
            ``.states``, ``.shape``, ``.step``, ``.settings``, ``.entries``, ``.buffers``,
            ``.missing``) and skips what they affect; by default they are raised.

    Raises:
        UnsupportedError: the kind of optimizer is not supported, or nothing proves which state
            belongs to which parameter.
        CorruptError: ranks contradict each other.
    """
    ranks = catalog.facet(RankFacts)
    kind = None if ranks is None else ranks.optimizer_kind
    if kind == "optim.pt":
        raise UnsupportedError(
            "the optimizer is in optim.pt files, which Megatron-LM wrote before 2023-05 and ckpt "
            "cannot reshard",
            hint="drop the optimizer with --no-optim; the weights are exact",
        )
    if kind == "distributed":
        from core.megatron.optimizer.flat.read import read_flat

        return read_flat(catalog, files, facts, rules, store=store, report=report)
    from core.megatron.optimizer.numbered.read import read_numbered

    return read_numbered(
        catalog,
        files,
        facts,
        rules,
        store=store,
        is_layer_wise=kind == "layer-wise",
        report=report,
    )


def optimizer_files(target: ReshardTarget) -> OptimizerFiles:
    """Return the empty optimizer files of a destination of rank files, to be filled rank by rank.

    Raises:
        UnsupportedError: the destination is to have legacy grouped experts and a distributed
            optimizer, or the optimizer's state cannot be written in its form.
    """
    from core.megatron.optimizer.flat.write import FlatFiles
    from core.megatron.optimizer.numbered.write import NumberedFiles

    if target.optimizer.kind != "distributed":
        return NumberedFiles(target)

    # Only weights of legacy grouped experts are transposed; a flat buffer has no strides for that.
    if any(cut.is_transposed for cut in target.cuts.values()):
        raise UnsupportedError(
            "distributed optimizer buffers cannot be written for GroupedMLP experts",
            hint="drop the optimizer with --no-optim, or write one module per expert with "
            f"{OPTION} sequential",
        )
    return FlatFiles(target)
