"""Parameters that are stored in parts of flat tensors, and their fragments.

ZeRO concatenates flattened parameters and cuts the result into one part per rank, ignoring rows. A
range of flat elements consists of up to ``2 * rank - 1`` boxes of a parameter with ``rank`` axes
(``core.arrays.box``), each of which is a dense array in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape, boxes_of_flat_range
from core.arrays.dtypes import itemsize
from core.catalog.stored import Extent, StoredArray
from core.catalog.tensor import Fragment, Tensor
from core.values import dataclass

if TYPE_CHECKING:
    from core.formats.deepspeed.partition import Partition


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of elements of a flattened tensor, and where it is stored.

    Args:
        array: the flat array that contains the run, with one axis and no gaps.
        at: first element in that array.
        start: first element in the flattened tensor.
        n: number of elements.
    """

    array: StoredArray
    at: int
    start: int
    n: int


def tensor_of_runs(dtype: str, shape: Shape, runs: Callable[[], Iterable[StoredRun]]) -> Tensor:
    """Return a tensor whose elements are stored in several flat arrays.

    Args:
        runs: returns the runs that together are the tensor; called when fragments are requested.
    """

    def fragments() -> Sequence[Fragment]:
        return tuple(fragment for run in runs() for fragment in list_run_fragments(shape, run))

    return Tensor(dtype, shape, fragments)


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
) -> list[StoredRun]:
    """Return where a parameter is stored in the flat groups of all ranks.

    Args:
        flat: rank → flat group → array.
    """
    return [
        StoredRun(flat[run.rank][run.group], run.at, run.start, run.n)
        for run in partition.runs(name)
    ]


def list_run_fragments(shape: Shape, run: StoredRun) -> list[Fragment]:
    """Return the fragments of one run, one per box, in C order."""
    position = run.at
    fragments = []
    for box in boxes_of_flat_range(shape, run.start, run.start + run.n):
        array = part_of_array(run.array, position, box.shape)
        fragments.append(Fragment(box, array, (0,) * len(box.shape)))
        position += box.n_elements
    return fragments


def part_of_array(array: StoredArray, first: int, shape: Shape) -> StoredArray:
    """Return the elements of a dense array from the ``first`` on, as an array of a shape."""
    extent = array.extent
    assert extent.strides is None
    return replace(
        array,
        name=f"{array.name}[{first}:{first + prod(shape)}]",
        shape=shape,
        extent=Extent(extent.file, extent.offset + first * itemsize(array.dtype)),
    )


def pair_with_copy(
    key: str, runs: Iterable[StoredRun], copy: StoredArray
) -> Iterator[tuple[str, StoredArray, StoredArray]]:
    """Yield (key, master weights, weights) of each run of a parameter's master weights.

    Args:
        runs: the runs that together are the flattened parameter.
        copy: the same parameter, complete, in the model's precision.
    """
    runs = list(runs)
    is_whole = len(runs) == 1 or prod(copy.shape) != sum(run.n for run in runs)
    for run in runs:
        masters = part_of_array(run.array, run.at, (run.n,))
        if is_whole:  # or of another size, which is told by the comparison
            yield key, masters, copy
        elif copy.extent.strides is None:
            yield key, masters, part_of_array(copy, run.start, (run.n,))


def reshaped(array: StoredArray, shape: Shape) -> StoredArray:
    """Return an array without gaps with another shape of as many elements."""
    assert array.extent.strides is None and prod(shape) == prod(array.shape)
    return replace(array, shape=shape)
