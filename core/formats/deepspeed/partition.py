"""ZeRO's partition of parameters among data-parallel ranks: pure integers.

ZeRO-1 and 2. Per group, the parameters one after the other, then cut into equal parts, the last ones padded::

    parameters   │ embed (888)    │ w1 (1752)          │ w2 (1752)      …│ padding
    ranks        │ rank 0 (4392)                │ rank 1 (4392)           │

ZeRO-3. Every parameter is cut for itself into ``ceil(n / ranks)`` elements, the last part padded; a
rank has its parts
one after the other, through all groups::

    rank 0       │ embed 0–444    │ bias 0–37  …│
    rank 1       │ embed 444–888  │ bias 37–73, 1 of padding …│

Source: DeepSpeed 0.19.8 ``utils/zero_to_fp32.py`` (its output is what the tests compare with),
``runtime/zero/ stage_1_and_2.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

from core.arrays.box import Shape
from core.errors import CorruptError

Shapes = Mapping[str, Shape]
"""Parameter name → shape, in the order in which they are concatenated."""


@dataclass(frozen=True, slots=True)
class PartitionRun:
    """Elements [start, start + n) of a parameter, at element ``at`` of flat group ``group`` of
    ``rank``.
    """

    rank: int
    group: int
    at: int
    start: int
    n: int


class Partition(Protocol):
    """The positions of all parameters."""

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Return the parts of a parameter, in the order of its elements."""

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat groups that hold a parameter."""


@dataclass(frozen=True, slots=True)
class CutGroups:
    """The partition of ZeRO-1 and 2. Made by ``cut_groups``.

    Args:
        groups: the parameters of each group.
        first: name → (group, first element in the group).
        starts: per group, the element of the group at which each rank begins, and the end.
    """

    groups: Sequence[Shapes]
    first: Mapping[str, tuple[int, int]]
    starts: Sequence[Sequence[int]]

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Yield the parts of a parameter, in the order of its elements."""
        group, first_element = self.first[name]
        end = first_element + prod(self.groups[group][name])
        starts = self.starts[group]
        rank = max(bisect_right(starts, first_element) - 1, 0)
        position = first_element
        while position < end:
            stop = min(end, starts[rank + 1])
            if stop > position:
                yield PartitionRun(
                    rank, group, position - starts[rank], position - first_element, stop - position
                )
                position = stop
            rank += 1

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat group that holds a parameter."""
        return (self.first[name][0],)


def cut_groups(
    groups: Sequence[Shapes],
    sizes: Sequence[Sequence[int]],
    *,
    alignment: Sequence[Sequence[int]] | None,
) -> CutGroups:
    """Return the partition of ZeRO-1 and 2.

    Args:
        groups: the parameters of each group.
        sizes: per rank, the number of elements of each group that it holds, with or without the
            padding at the end.
        alignment: per group, the padding after each parameter, in elements; None for none.

    Raises:
        CorruptError: the sizes do not add up.
    """
    n_ranks = len(sizes)
    first: dict[str, tuple[int, int]] = {}
    starts = []
    for group, shapes in enumerate(groups):
        offset = 0
        gaps = [0] * len(shapes) if alignment is None else alignment[group]
        if len(gaps) != len(shapes):
            raise CorruptError(
                f"group {group} has {len(shapes)} parameters, but {len(gaps)} alignment paddings"
            )
        # Parameters follow each other, with paddings between them.
        last = offset
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            if name in first:
                raise CorruptError(
                    f"the parameter is in groups {first[name][0]} and {group}", key=name
                )
            first[name] = (group, offset)
            offset += prod(shape)
            last = offset
            offset += gap
        # The ranks' parts must add up to the group.
        rank_starts = [0, *accumulate(rank[group] for rank in sizes)]
        starts.append(rank_starts)
        # DeepSpeed pads to multiples of 2 × ranks, and strips some of it, in ways that depend on its version.
        step = 2 * n_ranks
        if rank_starts[-1] < last or -(-offset // step) != -(-rank_starts[-1] // step):
            raise CorruptError(
                f"the {len(shapes)} parameters of group {group} need {offset} elements, but its parts on {n_ranks} "
                f"ranks have {rank_starts[-1]}",
                hint="files of different checkpoints were mixed, or one belongs to another run",
            )
    return CutGroups(groups, first, starts)


@dataclass(frozen=True, slots=True)
class CutParameters:
    """The partition of ZeRO-3. Made by ``cut_parameters``.

    Args:
        shapes: every parameter, through all groups.
        first: name → its first element on every rank, counted through all flat groups.
        starts: element at which each flat group begins, and the end; the same on every rank.
        n_ranks: number of ranks.
    """

    shapes: Shapes
    first: Mapping[str, int]
    starts: Sequence[int]
    n_ranks: int

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Yield the parts of a parameter, in the order of its elements."""
        n = prod(self.shapes[name])
        part = -(-n // self.n_ranks)
        for rank in range(self.n_ranks):
            start, stop = rank * part, min((rank + 1) * part, n)
            position = self.first[name]
            while start < stop:
                group = bisect_right(self.starts, position) - 1
                length = min(stop - start, self.starts[group + 1] - position)
                yield PartitionRun(rank, group, position - self.starts[group], start, length)
                start, position = start + length, position + length

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat groups that hold a parameter."""
        return tuple(dict.fromkeys(run.group for run in self.runs(name)))


def cut_parameters(groups: Sequence[Shapes], sizes: Sequence[Sequence[int]]) -> CutParameters:
    """Return the partition of ZeRO-3.

    Args:
        groups: the parameters of each group.
        sizes: per rank, the number of elements of each flat group.

    Raises:
        CorruptError: the sizes do not add up, or differ between ranks.
    """
    n_ranks = len(sizes)
    for rank, rank_sizes in enumerate(sizes):
        if list(rank_sizes) != list(sizes[0]):
            raise CorruptError(
                f"the flat groups of rank {rank} have {list(rank_sizes)[:8]} elements, but those of rank 0 "
                f"{list(sizes[0])[:8]}",
                hint="files of different checkpoints were mixed",
            )
    shapes: dict[str, Shape] = {}
    first: dict[str, int] = {}
    offset = 0
    for group_shapes in groups:
        for name, shape in group_shapes.items():
            if name in shapes:
                raise CorruptError("the parameter is in two groups", key=name)
            shapes[name] = shape
            first[name] = offset
            offset += -(-prod(shape) // n_ranks)
    starts = [0, *accumulate(sizes[0])]
    if offset != starts[-1]:
        raise CorruptError(
            f"the parts of {len(shapes)} parameters need {offset} elements a rank, but the flat groups have "
            f"{starts[-1]}",
            hint="files of different checkpoints were mixed, or one belongs to another run",
        )
    return CutParameters(shapes, first, starts, n_ranks)
