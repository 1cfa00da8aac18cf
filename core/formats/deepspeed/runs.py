"""Where parameters are in ZeRO's flat groups.

ZeRO concatenates flattened parameters and cuts the result into one part per rank, ignoring rows
(``core.engine.catalog.flat_runs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.engine.catalog.flat_runs import FlatRun, tensor_of_runs
from core.engine.catalog.stored import StoredArray, narrow_array
from core.engine.catalog.tensor import Tensor

if TYPE_CHECKING:
    from core.formats.deepspeed.partition import Partition


def tensor_in_groups(
    partition: Partition, name: str, shape: Shape, flat: Sequence[Sequence[StoredArray]]
) -> Tensor:
    """Return a parameter, or one of its states, that is stored in the flat groups of all ranks.

    Args:
        flat: rank → flat group → array.
    """
    groups = partition.groups_of(name)
    return tensor_of_runs(
        flat[0][groups[0] if groups else 0].dtype,
        shape,
        lambda: list_runs_in_groups(partition, name, flat),
    )


def list_runs_in_groups(
    partition: Partition, name: str, flat: Sequence[Sequence[StoredArray]]
) -> list[FlatRun]:
    """Return where a parameter is stored in the flat groups of all ranks.

    Args:
        flat: rank → flat group → array.
    """
    return [
        FlatRun(run.start, run.n, flat[run.rank][run.group], run.at) for run in partition.runs(name)
    ]


def pair_with_copy(
    key: str, runs: Iterable[FlatRun], copy: StoredArray
) -> Iterator[tuple[str, StoredArray, StoredArray]]:
    """Yield (key, master weights, weights) of each run of a parameter's master weights.

    Args:
        runs: the runs that together are the flattened parameter.
        copy: the same parameter, complete, in the model's precision.
    """
    runs = list(runs)
    is_whole = len(runs) == 1 or prod(copy.shape) != sum(run.n for run in runs)
    for run in runs:
        masters = narrow_array(run.array, run.at, (run.n,))
        if is_whole:  # or of another size, which is told by the comparison
            yield key, masters, copy
        elif copy.extent.strides is None:
            yield key, masters, narrow_array(copy, run.start, (run.n,))


def reshaped(array: StoredArray, shape: Shape) -> StoredArray:
    """Return an array without gaps with another shape of as many elements."""
    assert array.extent.strides is None and prod(shape) == prod(array.shape)
    return replace(array, shape=shape)
