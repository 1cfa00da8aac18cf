"""The optimizer of rank files that are to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.catalog import Catalog, Coords, Fragment, StoredArray
from core.errors import UnsupportedError
from core.layout_args import Facts
from core.layout_cut import Cut
from core.layout_rules import Rules
from core.optimizer import Optimizer
from core.topology import Rank, Topology


@dataclass(frozen=True, slots=True)
class HeldParam:
    """A tensor of a rank's state dict.

    Args:
        key: its global name.
        chunk: ``model``, ``model0`` …
        name: its name there.
    """

    key: str
    chunk: str
    name: str


class OptimizerFiles:
    """What the ranks' files hold of an optimizer; filled rank by rank.

    Args:
        catalog: the global per-layer form, with the optimizer's states among its tensors.
        topology: sizes of the destination.
        cuts: how every tensor is cut, states included.

    Attributes:
        files: coordinates → content of distrib_optim.pt, where there is such a file.
        steps: where the number of steps goes, if it is a tensor.
        notes, dropped: as in the catalog's attrs.

    Raises:
        UnsupportedError: the destination's form of it is not determined.
    """

    def __init__(
        self,
        catalog: Catalog,
        optimizer: Optimizer,
        topology: Topology,
        facts: Facts,
        rules: Rules,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.files: dict[Coords, object] = {}
        self.steps: list[StoredArray] = []
        self.notes: list[str] = []
        self.dropped: list[str] = []
        raise UnsupportedError("the optimizer cannot be written as rank files yet", hint="leave it out with --no-optim")

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Takes the tensors that a rank's file holds, in order; returns its entry ``optimizer``."""
        raise NotImplementedError

    def fragments(self, key: str) -> Sequence[Fragment]:
        """The target's fragments of one state, when all ranks have been added."""
        raise NotImplementedError
