"""The arrays of rank files that will hold an optimizer's tensors at a destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from core.catalog.stored import Coords, PlannedArray
from core.catalog.tensor import TargetFragment
from core.megatron.extras.common_state import plan_entry
from core.megatron.model.topology import Rank
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.values import dataclass


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
        entry = plan_entry(self.target.catalog, dict(entries), place, coords)
        for key, array in entry.arrays:
            self.beside.setdefault(key, []).append(array)
        assert isinstance(entry.value, dict)
        return entry.value

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state; all ranks must have been added."""
        cut = self.target.cuts[key]
        return tuple(
            fragment
            for rank, array in self.of_state.get(key, ())
            for fragment in cut.fragments(key, rank, array)
        )
