"""CK507, CK509: check that every rank file is in the directory of the rank that wrote it.

``core.megatron.extras.rank_numbers`` says how the number of a file's rank proves it, and
``core.megatron.reshard.padding_place`` how the padding of the vocabulary does without one.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.engine.catalog.facets import RankFacts
from core.megatron.extras.rank_numbers import describe_misplaced, find_misplaced, have_numbers
from core.megatron.model.topology import Topology
from core.megatron.reshard.padding_place import find_misplaced_padding
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

SWAPPED = get_code("CK507")

UNPROVEN = get_code("CK509")


def report_rank_numbers(subject: Subject) -> Iterator[Finding]:
    """Compare the rank numbers in the files with the names of the directories (CK507, CK509)."""
    catalog = subject.salvaged.catalog
    facts = None if catalog is None else catalog.facet(RankFacts)
    if facts is None:
        return
    topology = None if catalog is None else catalog.facet(Topology)
    if topology and not have_numbers(facts.ranks.values()) and subject.recorded is None:
        # The embedding and the model's end prove the stages that have them.
        is_v_shaped = topology.pipeline is not None and topology.pipeline.is_v_shaped
        n_proven = 1 if is_v_shaped else 2
        axes = [
            name
            for name, is_free in (
                ("tensor-parallel ranks", topology.tp > 1),
                ("pipeline stages without embedding and output", topology.pp > n_proven + 1),
                ("expert-parallel ranks", topology.ep > 1),
            )
            if is_free
        ]
        if axes:
            yield UNPROVEN.finding(
                "the arguments do not say which rank wrote each file, so files swapped between "
                f"{' and '.join(axes)} would go unnoticed",
                key="args.rank",
            )
        model = subject.model.understood
        if model is not None and not subject.model.is_sample:
            err = find_misplaced_padding(model.held, model.facts, subject.store)
            if err is not None:
                yield SWAPPED.finding(err.message, rank=err.rank, key=err.key)
    for misplaced in find_misplaced(facts.ranks.values()):
        is_copy = misplaced.expected is None
        yield SWAPPED.finding(
            describe_misplaced(misplaced.number),
            rank=misplaced.folder,
            key="args.rank",
            expected="a different number in each file" if is_copy else f"rank {misplaced.expected}",
            found="the same number as another rank" if is_copy else f"rank {misplaced.number}",
        )


CHECKS = (Check(report_rank_numbers, Level.HEADERS, formats=("megatron",)),)
