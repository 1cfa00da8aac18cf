"""The destination of an optimizer that is resharded: what decides its files, groups and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import Optimizer
from core.megatron.model.cut import Cut
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.model.version import MegatronVersion
from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardTarget:
    """An optimizer in the global per-layer form, and the layout that it is to have.

    Args:
        catalog: the model in the global per-layer form, with the optimizer's states among its
            tensors.
        optimizer: the catalog's, without its tensors.
        topology: sizes of the destination.
        facts: facts about the source.
        rules: the layout's table.
        cuts: how the destination cuts every tensor, states included.
        version: the megatron-core that is to load the result; None for the one that wrote the
            source.
    """

    catalog: Catalog
    optimizer: Optimizer
    topology: Topology
    facts: ModelFacts
    rules: Rules
    cuts: Mapping[str, Cut]
    version: MegatronVersion | None = None

    @property
    def args(self) -> object:
        """The source's training arguments."""
        return self.catalog.args
