"""The destination of an optimizer to reshard: the facts that decide its files, groups and keys.

``TargetArrays`` collects the arrays of rank files that will hold the optimizer's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import Optimizer
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import TargetFragment
from core.megatron.extras.common_state import plan_entry
from core.megatron.model.args import fields_of
from core.megatron.model.cut import Cut
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Rank, Topology
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


@dataclass(frozen=True, slots=True)
class TargetArrays:
    """The planned arrays of all ranks that have been added.

    Args:
        target: the destination.
        beside: key of a hidden tensor of the source → the arrays that it is copied to.
        of_state: key of a state → (rank, array of the rank's shard).
    """

    target: ReshardTarget
    beside: dict[str, list[PlannedArray]] = field(default_factory=dict)
    of_state: dict[str, list[tuple[Rank, PlannedArray]]] = field(default_factory=dict)

    def add_shard(self, key: str, rank: Rank, array: PlannedArray) -> None:
        """Add the array that holds a rank's shard of a state."""
        self.of_state.setdefault(key, []).append((rank, array))

    def copy_entries(
        self, entries: Mapping[str, object], place: str, coords: Coords
    ) -> dict[object, object]:
        """Copy entries for a rank's file; their tensors, if any, become arrays of that rank.

        Args:
            entries: settings of a group, or entries other than groups and states.
            place: prefix of the arrays' names.
            coords: coordinates of the rank.
        """
        value, arrays = plan_entry(self.target.catalog, dict(entries), place, coords)
        for key, array in arrays:
            self.beside.setdefault(key, []).append(array)
        assert isinstance(value, dict)
        return value

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state; all ranks must have been added."""
        cut = self.target.cuts[key]
        return tuple(
            fragment
            for rank, array in self.of_state.get(key, ())
            for fragment in cut.fragments(key, rank, array)
        )
