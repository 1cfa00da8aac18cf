"""ZeRO's partition of parameters among data-parallel ranks: pure integers.

ZeRO-1 and 2. The parameters of a group are concatenated, then cut into equal parts, the last of
which are padded::

    parameters   │ embed (888)    │ w1 (1752)          │ w2 (1752)      …│ padding
    ranks        │ rank 0 (4392)                │ rank 1 (4392)           │

A group of experts is concatenated and cut so once per expert-parallel rank, among the ranks that
have the same experts; all of them store it under one number (``FlatGroup``).

ZeRO-3. Every parameter is cut separately into parts of ``ceil(n / ranks)`` elements, the last of
which is padded. A rank concatenates its parts of all parameters, through all groups::

    rank 0       │ embed 0–444    │ bias 0–37  …│
    rank 1       │ embed 444–888  │ bias 37–73, 1 of padding …│

Source: DeepSpeed 0.19.8 ``utils/zero_to_fp32.py`` (the tests compare with its output),
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from math import prod
from typing import Protocol

from core.arrays.box import Shape
from core.errors import CorruptError, list_some
from core.formats.deepspeed.state_file import MIXED_STEPS_HINT
from core.values import dataclass

Shapes = Mapping[str, Shape]
"""Parameter name → shape, in the order in which they are concatenated."""


@dataclass(frozen=True, slots=True)
class PartitionRun:
    """A run of a parameter's elements that is contiguous in a flat group of one rank.

    Args:
        rank: data-parallel rank that stores the run.
        group: flat group of that rank.
        at: first element in the flat group.
        start: first element in the flattened parameter.
        n: number of elements.
    """

    rank: int
    group: int
    at: int
    start: int
    n: int


class Partition(Protocol):
    """The positions of all parameters in the flat groups."""

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Yield the runs of a parameter, in the order of its elements."""

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat groups that contain elements of a parameter."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters that ZeRO-1 and 2 concatenate and cut among some ranks.

    Args:
        number: the group's number in the files of these ranks.
        shapes: shapes of its parameters.
        ranks: data-parallel ranks that have a part, in the order of the parts.
        stored_names: name → name in the files; {} if these are the same.
    """

    number: int
    shapes: Shapes
    ranks: Sequence[int]
    stored_names: Mapping[str, str] = field(default_factory=dict)


def plain_groups(groups: Sequence[Shapes], n_ranks: int) -> list[FlatGroup]:
    """Return groups of which every rank has a part."""
    return [FlatGroup(number, shapes, range(n_ranks)) for number, shapes in enumerate(groups)]


@dataclass(frozen=True, slots=True)
class CutGroups:
    """The partition of ZeRO-1 and 2, as returned by ``cut_groups``.

    Args:
        groups: the groups that were cut.
        first: name → (index of its group in ``groups``, first element in the group).
        starts: per group, the element at which the part of each rank begins, and the end.
    """

    groups: Sequence[FlatGroup]
    first: Mapping[str, tuple[int, int]]
    starts: Sequence[Sequence[int]]

    @property
    def shapes(self) -> Shapes:
        """Shapes of the parameters of all groups."""
        return {name: shape for group in self.groups for name, shape in group.shapes.items()}

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Yield the runs of a parameter, in the order of its elements."""
        index, first_element = self.first[name]
        group, starts = self.groups[index], self.starts[index]
        end = first_element + prod(group.shapes[name])
        # Begin at the part that contains the first element; parts may be empty.
        part = max(bisect_right(starts, first_element) - 1, 0)
        position = first_element
        while position < end:
            stop = min(end, starts[part + 1])
            if stop > position:
                yield PartitionRun(
                    group.ranks[part],
                    group.number,
                    position - starts[part],
                    position - first_element,
                    stop - position,
                )
                position = stop
            part += 1

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat group that contains a parameter."""
        return (self.groups[self.first[name][0]].number,)


def cut_groups(
    groups: Sequence[FlatGroup],
    sizes: Sequence[Sequence[int]],
    *,
    alignment: Sequence[Sequence[int]] | None,
) -> CutGroups:
    """Return the partition of ZeRO-1 and 2.

    Args:
        sizes: rank → number of a group → elements of the rank's part, with or without the padding
            at the end.
        alignment: number of a group → the padding after each parameter, in elements; None for
            none.

    Raises:
        CorruptError: the sizes do not match the shapes, or a parameter is in two groups.
    """
    first: dict[str, tuple[int, int]] = {}
    starts = []
    for index, group in enumerate(groups):
        offset = 0
        gaps = [0] * len(group.shapes) if alignment is None else alignment[group.number]
        if len(gaps) != len(group.shapes):
            raise CorruptError(
                f"group {group.number} has {len(group.shapes)} parameters, but {len(gaps)} "
                "alignment paddings"
            )
        # Parameters follow each other, with paddings between them; ``last`` is the end of the last
        # parameter, without its padding.
        last = offset
        for (name, shape), gap in zip(group.shapes.items(), gaps, strict=True):
            if name in first:
                raise CorruptError(
                    f"the parameter is in two groups, {groups[first[name][0]].number} and "
                    f"{group.number}",
                    key=name,
                )
            first[name] = (index, offset)
            offset += prod(shape)
            last = offset
            offset += gap
        # The parts of all ranks must add up to the group. DeepSpeed pads it to a multiple of
        # 2 × ranks, and strips some of the padding, in ways that depend on its version.
        rank_starts = [0, *accumulate(sizes[rank][group.number] for rank in group.ranks)]
        starts.append(rank_starts)
        step = 2 * len(group.ranks)
        if rank_starts[-1] < last or -(-offset // step) != -(-rank_starts[-1] // step):
            raise CorruptError(
                f"the {len(group.shapes)} parameters of group {group.number} need {offset} "
                f"elements, but the group's parts on {len(group.ranks)} ranks have "
                f"{rank_starts[-1]}",
                hint=MIXED_STEPS_HINT,
            )
    return CutGroups(groups, first, starts)


@dataclass(frozen=True, slots=True)
class CutParameters:
    """The partition of ZeRO-3, as returned by ``cut_parameters``.

    Args:
        shapes: shapes of the parameters of all groups.
        first: name → its first element on every rank, counted through all flat groups.
        starts: the element at which each flat group begins, and the end; the same on every rank.
        n_ranks: number of ranks.
    """

    shapes: Shapes
    first: Mapping[str, int]
    starts: Sequence[int]
    n_ranks: int

    def runs(self, name: str) -> Iterator[PartitionRun]:
        """Yield the runs of a parameter, in the order of its elements."""
        n = prod(self.shapes[name])
        part = -(-n // self.n_ranks)
        for rank in range(self.n_ranks):
            start, stop = rank * part, min((rank + 1) * part, n)
            position = self.first[name]
            # A rank's flat groups count as one sequence: the part may continue in the next one.
            while start < stop:
                group = bisect_right(self.starts, position) - 1
                length = min(stop - start, self.starts[group + 1] - position)
                yield PartitionRun(rank, group, position - self.starts[group], start, length)
                start, position = start + length, position + length

    def groups_of(self, name: str) -> Sequence[int]:
        """Return the flat groups that contain elements of a parameter."""
        return tuple(dict.fromkeys(run.group for run in self.runs(name)))


def cut_parameters(groups: Sequence[Shapes], sizes: Sequence[Sequence[int]]) -> CutParameters:
    """Return the partition of ZeRO-3.

    Args:
        groups: shapes of the parameters of each group.
        sizes: per rank, the number of elements of each flat group.

    Raises:
        CorruptError: the sizes do not match the shapes or differ between ranks, or a parameter is
            in two groups.
    """
    # All parts of a parameter are equally long, so that the ranks have the same flat groups.
    n_ranks = len(sizes)
    for rank, rank_sizes in enumerate(sizes):
        if list(rank_sizes) != list(sizes[0]):
            raise CorruptError(
                f"rank {rank}'s flat groups have {list_some(rank_sizes)} elements, but rank 0's "
                f"have {list_some(sizes[0])}",
                hint=MIXED_STEPS_HINT,
            )
    # Concatenate the parts of the parameters of all groups.
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
            f"the parts of {len(shapes)} parameters need {offset} elements per rank, but the flat "
            f"groups have {starts[-1]}",
            hint=MIXED_STEPS_HINT,
        )
    return CutParameters(shapes, first, starts, n_ranks)
