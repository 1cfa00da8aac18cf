"""The destination of an optimizer to reshard: the facts that decide its files, groups and keys."""

from __future__ import annotations

from collections.abc import Mapping

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import Optimizer
from core.megatron.model.args import fields_of
from core.megatron.model.cut import Cut
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.model.version import MegatronVersion
from core.megatron.optimizer.groups import is_layer_wise, is_muon
from core.megatron.rules.rules import Rules
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardTarget:
    """An optimizer in the global per-layer form, and its layout at the destination.

    Args:
        catalog: the model in the global per-layer form, with the optimizer's states among its
            tensors.
        optimizer: settings and groups of the catalog's optimizer.
        topology: sizes of the destination.
        facts: facts about the source.
        rules: the rule table of the destination.
        cuts: key of every tensor, states included → its cut at the destination.
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

    @property
    def is_layer_wise(self) -> bool:
        """True if the optimizer is a Muon that is distributed by layers (``dist_muon``)."""
        has_muon = any(is_muon(group.settings) for group in self.optimizer.groups)
        return has_muon and is_layer_wise(fields_of(self.args))
