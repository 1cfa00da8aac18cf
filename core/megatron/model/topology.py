"""Parallel sizes, and the rank directories that Megatron writes for them.

Directory names (``core.formats.megatron.format``)::

    mp_rank_{tp:02d}                     neither PP > 1 nor EP > 1
    mp_rank_{tp:02d}_{pp:03d}            PP > 1
    mp_rank_{tp:02d}_{ep:03d}            EP > 1 and PP == 1: looks like the previous line
    mp_rank_{tp:02d}_{pp:03d}_{ep:03d}   both

A name alone does not distinguish PP from EP, and with EP > 1 not every (TP, EP) pair exists. So
names are never parsed: the sizes come from the training arguments, the names follow from the sizes,
and the two sets are compared.

Source: Megatron-LM d98e8a64, ``training/checkpointing.py`` ``get_checkpoint_name``,
``core/parallel_state.py`` ``RankGenerator``. With ``use_tp_pp_dp_mapping``, ranks have other
numbers, but the same files are written: Megatron then requires TP × CP = ETP × EP (or one pipeline
stage), so that all stages have the (TP, EP) pairs of the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from math import lcm
from typing import TYPE_CHECKING

from core.engine.catalog.stored import Coords
from core.errors import CorruptError, MissingShardError, UnsupportedError, UsageError
from core.values import dataclass

if TYPE_CHECKING:
    from core.megatron.model.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates of one rank of a model replica.

    Args:
        tp, pp, ep: tensor, pipeline and expert parallel ranks.
        etp: rank among the ranks that cut experts.
    """

    tp: int
    pp: int
    ep: int = 0
    etp: int = 0

    def within(self, group: str) -> int:
        """Return the rank's number in a group that cuts tensors, ``tp`` or ``etp``."""
        return self.tp if group == "tp" else self.etp


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel groups that cut a model.

    Args:
        tp: tensor parallel size.
        pp: pipeline parallel size, in stages.
        vpp: number of model chunks per stage (virtual pipeline).
        ep: expert parallel size.
        etp: tensor parallel size of experts; None for the same as ``tp``.
        pipeline: distribution of layers over the stages; None for that of the training arguments
            (``core.megatron.model.facts.ModelFacts.pipeline_at``).

    Raises:
        UsageError: a size is not a positive integer.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "pipeline" or (size is None and field.name == "etp"):
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(f"{field.name.upper()} size {size!r} is not a positive integer")

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    def __str__(self) -> str:
        text = f"TP{self.tp} PP{self.pp}"
        if self.vpp > 1:
            text += f" VPP{self.vpp}"
        if self.ep > 1:
            text += f" EP{self.ep}"
        if self.etp is not None and self.etp != self.tp:
            text += f" ETP{self.etp}"
        if self.pipeline is not None and not self.pipeline.is_even:
            text += f" ({self.pipeline})"
        return text

    def size_of(self, group: str) -> int:
        """Return the number of shards of a tensor that is cut over a group, ``tp`` or ``etp``."""
        return self.tp if group == "tp" else self.expert_tp

    def coords(self, rank: Rank) -> Coords:
        """Return the coordinates of a rank in the form that stored arrays have."""
        expert = (("ep", rank.ep),) if self.ep > 1 else ()
        return (("tp", rank.tp), ("pp", rank.pp), *expert)

    def rank_at(self, coords: Coords) -> Rank:
        """Return the rank of a file, given the coordinates of its arrays."""
        ranks = dict(coords)
        return Rank(ranks["tp"], ranks["pp"], ranks.get("ep", 0), ranks["tp"] % self.expert_tp)

    @property
    def stage_size(self) -> int:
        """Number of ranks in a pipeline stage with different shards; further ranks are copies."""
        return lcm(self.tp, self.expert_tp * self.ep)

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank of one model replica, in the order of Megatron's global ranks.

        TP and EP ranks co-vary: with TP4 EP8 ETP1, TP rank 1 occurs with EP ranks 1 and 5 only.
        """
        for pp_rank in range(self.pp):
            for q in range(self.stage_size):
                yield self.rank_of(q, pp_rank)

    def rank_of(self, q: int, pp_rank: int) -> Rank:
        """Return rank ``q`` of a pipeline stage."""
        return Rank(q % self.tp, pp_rank, (q // self.expert_tp) % self.ep, q % self.expert_tp)


def check_rank_files(topology: Topology) -> None:
    """Raise for sizes at which two ranks with different experts write one file.

    Raises:
        UnsupportedError: ETP does not divide TP.
    """
    if topology.tp % topology.expert_tp:
        raise UnsupportedError(
            f"ETP {topology.expert_tp} does not divide TP {topology.tp}, so several Megatron ranks "
            "would write the same file and experts would be lost",
            hint="use torch_dist for these sizes, or an ETP that divides TP",
        )


def rank_dir(topology: Topology, rank: Rank) -> str:
    """Return the name of a rank's directory."""
    name = f"mp_rank_{rank.tp:02d}"
    if topology.pp > 1:
        name += f"_{rank.pp:03d}"
    if topology.ep > 1:
        name += f"_{rank.ep:03d}"
    return name


def rank_dirs(
    topology: Topology, *, world_size: int | None = None, cp: int = 1
) -> list[dict[str, Coords]]:
    """Return the sets of directories that a training run may have written.

    Without expert parallelism there is one set, the full product. With it, TP and EP ranks co-vary,
    and the ranks that write depend on the version. The last set is that of
    ``core.megatron.reshard.to_ranks``: the files that any run of these sizes needs.

    Args:
        topology: the run's sizes.
        world_size: number of ranks in the run, used only with EP > 1; None for the smallest number.
        cp: context parallel size.

    Returns:
        Sets of the newest version first; each maps directory names to coordinates of ranks.

    Raises:
        UnsupportedError: two ranks would write different experts to one file, or the sizes do not
            divide.
    """
    check_rank_files(topology)
    full_set = {rank_dir(topology, rank): topology.coords(rank) for rank in topology.ranks()}
    if topology.ep == 1:
        return [full_set]

    # Number of ranks in a pipeline stage, which must be multiples of both groups.
    n_dense, n_expert = topology.tp * cp, topology.expert_tp * topology.ep
    n_stage = max(n_dense, n_expert)
    if world_size is not None:
        n_stage, rest = divmod(world_size, topology.pp)
        if rest or n_stage == 0 or n_stage % n_dense or n_stage % n_expert:
            raise UnsupportedError(
                f"{world_size} ranks (world_size) cannot be divided into {topology}"
            )

    # Ranks that write: since core 0.19, and before.
    candidates = []
    for n_writers in (max(n_dense, n_expert), n_expert):
        ranks = [
            topology.rank_of(q, p)
            for p in range(topology.pp)
            for q in range(min(n_writers, n_stage))
        ]
        candidates.append({rank_dir(topology, rank): topology.coords(rank) for rank in ranks})
    candidates.append(full_set)
    return [names for n, names in enumerate(candidates) if names not in candidates[:n]]


def matched_dirs(
    existing: Iterable[str], expected: list[dict[str, Coords]], *, topology: Topology
) -> dict[str, Coords]:
    """Return the expected set that equals the existing directories.

    Args:
        existing: directory names.
        expected: the result of ``rank_dirs``.
        topology: the run's sizes, for messages.

    Raises:
        MissingShardError: a directory is missing; the error names missing and unexpected ones.
        CorruptError: there are more directories than the sizes allow.
    """
    names = set(existing)
    for candidate in expected:
        if names == set(candidate):
            return candidate

    # Describe the difference from the newest version's set, which is the first.
    wanted = set(expected[0])
    missing, unexpected = sorted(wanted - names), sorted(names - wanted)
    text = (
        f"the training arguments specify {topology}, which means {len(wanted)} rank directories, "
        "but "
    )
    parts = []
    if missing:
        parts.append(f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if unexpected:
        parts.append(f"{_listed(unexpected)} {'is' if len(unexpected) == 1 else 'are'} unexpected")
    if missing:
        raise MissingShardError(
            text + " and ".join(parts), hint="copy the checkpoint again, with all of its files"
        )
    raise CorruptError(
        text + " and ".join(parts), hint="move the directories of other runs elsewhere"
    )


def _listed(names: list[str]) -> str:
    if len(names) > 8:
        return f"{', '.join(names[:6])}, … {names[-1]} ({len(names)} in all)"
    return ", ".join(names)
