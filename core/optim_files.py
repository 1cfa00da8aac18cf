"""The optimizer of rank files that are to be written.

``optimizer_files`` leaves the work to ``core.optim_numbered_files`` (FP32 and Float16 optimizers, in
model_optim_rng.pt) or to what makes the distributed optimizer's distrib_optim.pt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from core.catalog import Catalog, Coords, Fragment, StoredArray
from core.errors import UnsupportedError
from core.image import JoinedArray
from core.layout_cut import Cut
from core.layout_experts import OPTION
from core.layout_facts import Facts
from core.layout_rules import Rules
from core.megatron_version import MegatronVersion
from core.optimizer import Optimizer
from core.topology import Rank, Topology
from core.value import value


@value(frozen=True, slots=True)
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


class OptimizerFiles(Protocol):
    """What the ranks' files hold of an optimizer; filled rank by rank.

    Attributes:
        files: coordinates → distrib_optim.pt (``core.optim_flat_content.OptimFile``), where there is such a file.
        arrays: by name, those of parameters' states in model_optim_rng.pt.
        beside: key of a hidden tensor of the source (the number of steps, say) → the arrays that it goes to.
        notes, dropped: as in the catalog's attrs.
    """

    files: dict[Coords, object]
    arrays: dict[str, StoredArray | JoinedArray]
    beside: dict[str, list[StoredArray]]
    notes: list[str]
    dropped: list[str]

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Takes the tensors that a rank's file holds, in order; returns its entry ``optimizer``."""

    def fragments(self, key: str) -> Sequence[Fragment]:
        """The target's fragments of one state, when all ranks have been added."""


def optimizer_files(
    catalog: Catalog,
    optimizer: Optimizer,
    topology: Topology,
    facts: Facts,
    rules: Rules,
    cuts: Mapping[str, Cut],
    *,
    version: MegatronVersion | None = None,
) -> OptimizerFiles:
    """What will hold an optimizer at a destination of rank files.

    Args:
        catalog: the global per-layer form, with the optimizer's states among its tensors.
        topology: sizes of the destination.
        facts: of the source.
        cuts: how every tensor is cut, states included.
        version: the megatron-core that is to load the files; None for the one that wrote the source.

    Raises:
        UnsupportedError: the destination's form of it is not determined.
    """
    from core.optim_flat_files import FlatFiles
    from core.optim_numbered_files import NumberedFiles

    if optimizer.kind == "distributed":
        if any(cut.is_transposed for cut in cuts.values()):
            raise UnsupportedError(
                "the distributed optimizer's buffers of GroupedMLP are not written",
                hint=f"leave the optimizer out with --no-optim, or write one module for each expert with {OPTION} "
                "sequential",
            )
        return FlatFiles(catalog, optimizer, topology, facts, rules, cuts, version=version)
    return NumberedFiles(catalog, optimizer, topology, facts, rules, cuts, version=version)
