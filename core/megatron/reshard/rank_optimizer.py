"""The optimizer of rank files, in the two forms that Megatron-LM has for it.

``core.megatron.optimizer.numbered`` reads and writes the FP32 and Float16 optimizers, which lie in
model_optim_rng.pt; ``core.megatron.optimizer.flat`` the distributed optimizer of distrib_optim.pt.
By the form, ``read_states`` returns which stored array of a rank is which state of which parameter,
and ``optimizer_files`` the files that a destination will have.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.errors import Report, UnsupportedError, raising
from core.files.store import ReadStore
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.rank_state import OptimizerFiles, RankFile, RankStates
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.rules.experts import OPTION
from core.megatron.rules.rules import Rules


def read_states(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: ModelFacts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """Read the optimizer of a rank catalog that has one.

    Args:
        catalog: ``core.formats.megatron.format``'s.
        files: all ranks.
        store: to compare masters with weights; None leaves that out.
        report: takes the problems of single ranks (rules ``optim.numbers``, ``.groups``,
            ``.states``, ``.shape``, ``.step``, ``.settings``, ``.entries``, ``.buffers``,
            ``.missing``), whose subjects are then left out; raises them, if none is given.

    Raises:
        UnsupportedError: the optimizer is of a kind that is not read, or nothing proves which state
            is whose.
        CorruptError: ranks contradict each other.
    """
    ranks = catalog.facet(RankFacts)
    kind = None if ranks is None else ranks.optimizer_kind
    if kind == "distributed":
        from core.megatron.optimizer.flat.read import read_flat

        return read_flat(catalog, files, facts, rules, store=store, report=report)
    if kind == "layer-wise":
        raise UnsupportedError(
            "the layer-wise optimizer (Muon) cannot be resharded yet",
            hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
        )
    from core.megatron.optimizer.numbered.read import read_numbered

    return read_numbered(catalog, files, facts, rules, store=store, report=report)


def optimizer_files(target: ReshardTarget) -> OptimizerFiles:
    """Return the files, still empty, that hold an optimizer at a destination of rank files.

    Raises:
        UnsupportedError: the destination's form of it is not determined.
    """
    from core.megatron.optimizer.flat.write import FlatFiles
    from core.megatron.optimizer.numbered.write import NumberedFiles

    if target.optimizer.kind != "distributed":
        return NumberedFiles(target)
    if any(cut.is_transposed for cut in target.cuts.values()):
        raise UnsupportedError(
            "the distributed optimizer's buffers of GroupedMLP are not written",
            hint=f"leave the optimizer out with --no-optim, or write one module for each expert with {OPTION} "
            "sequential",
        )
    return FlatFiles(target)
