"""Destinations of an optimizer without tensors, for what depends on groups, sizes and arguments
only.
"""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import catalog_of_arrays
from core.engine.catalog.optimizer_keys import Optimizer
from core.megatron.model.args import parse_facts
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.model.version import MegatronVersion
from core.megatron.optimizer.reshard_target import ReshardTarget
from tests.megatron.support.megatron_gold import RULES


def target_of(
    optimizer: Optimizer,
    args: object,
    *,
    topology: Topology,
    facts: ModelFacts | None = None,
    version: MegatronVersion | None = None,
) -> ReshardTarget:
    """Return the destination of an optimizer; ``facts`` are those of ``args`` unless given."""
    return ReshardTarget(
        catalog=replace(catalog_of_arrays(format="global", arrays={}), args=args),
        optimizer=optimizer,
        topology=topology,
        facts=parse_facts(args) if facts is None else facts,
        rules=RULES,
        cuts={},
        version=version,
    )
