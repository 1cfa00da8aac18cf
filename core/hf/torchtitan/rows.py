"""Rows of torchtitan's query, key and value weights, taken out and put into another order.

Only fragments change; they refer to the same arrays as before.

The fused parameter has the rows of one key-value head after those of the other. With two query
heads for each::

    q0 q1 k0 v0 | q2 q3 k1 v1 | …        each letter: the rows of one head

Source: torchtitan 0.3.0 ``models/common/attention.py`` (``FusedQKVLinear``).
"""

from __future__ import annotations

from collections.abc import Iterator

from core.arrays.box import Box, Shape, c_strides
from core.catalog.stored import StoredArray, part_of
from core.catalog.tensor import Fragment, Tensor, clip_fragment
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of a fused parameter that are the query, key or value weights.

    Args:
        stride: number of rows of one key-value head with its query heads.
        first: the first of these rows.
        n_rows: number of these rows.
    """

    stride: int
    first: int
    n_rows: int


def take_rows(fused: Tensor, rows: FusedRows, shape: Shape) -> Tensor:
    """Return some rows of a fused parameter, one below the other.

    Args:
        fused: the fused parameter.
        rows: the rows.
        shape: shape of the result.
    """

    def fragments() -> Iterator[Fragment]:
        for fragment in fused.fragments():
            box = fragment.box
            for group in range(box.offset[0] // rows.stride, -(-box.end[0] // rows.stride)):
                clipped = clip_fragment(
                    fragment,
                    start=group * rows.stride + rows.first,
                    extent=rows.n_rows,
                    to=group * rows.n_rows,
                )
                if clipped is not None:
                    yield clipped

    return Tensor(fused.dtype, shape, lambda: list(fragments()))


def halves_of_heads(matrix: Tensor, head_dim: int) -> Tensor:
    """Return the rows of a matrix in the order of halves, a few fragments for each head.

    Args:
        matrix: torchtitan's matrix.
        head_dim: rows of a head, an even number.
    """
    return Tensor(
        matrix.dtype,
        matrix.shape,
        lambda: [
            moved for fragment in matrix.fragments() for moved in _in_halves(fragment, head_dim)
        ],
    )


def _in_halves(fragment: Fragment, head_dim: int) -> Iterator[Fragment]:
    """Yield the rows of a fragment in the order of halves."""
    box = fragment.box
    first, stop = box.offset[0], box.end[0]
    pairs = _in_pairs(fragment, skipped=first % 2)
    start = first
    while start < stop:
        # Complete pairs of rows of one head; a single row where a fragment cuts a pair.
        head, row = divmod(start, head_dim)
        n_pairs = (min(stop, (head + 1) * head_dim) - start) // 2
        if pairs is None or row % 2 or n_pairs == 0:
            to = head * head_dim + row % 2 * (head_dim // 2) + row // 2
            yield _moved(fragment, start - first, to, 1)
            start += 1
            continue
        for half in (0, 1):
            to = head * head_dim + half * (head_dim // 2) + row // 2
            n_columns = pairs.shape[1] // 2
            half_box = Box((to, *box.offset[1:]), (n_pairs, *box.shape[1:]))
            at = ((start - first) // 2, half * n_columns + fragment.at[1])
            yield Fragment(half_box, pairs, at)
        start += 2 * n_pairs


def _moved(fragment: Fragment, n_skipped: int, to: int, n_rows: int) -> Fragment:
    """Return some rows of a fragment at another place of a tensor."""
    box, at = fragment.box, fragment.at
    # An array and its fragment are aligned at the last axis.
    row_axis = len(at) - box.rank
    if n_skipped and row_axis >= 0:
        at = (*at[:row_axis], at[row_axis] + n_skipped, *at[row_axis + 1 :])
    row_box = Box((to, *box.offset[1:]), (n_rows, *box.shape[1:]))
    return Fragment(row_box, fragment.array, at)


def _in_pairs(fragment: Fragment, *, skipped: int) -> StoredArray | None:
    """Return the array of a fragment with two rows of it side by side in each row.

    Args:
        fragment: a part of a matrix.
        skipped: rows of the fragment before the first pair.

    Returns:
        The array, whose first pair is that of the fragment; None if the array is not a dense
        matrix, or there is no pair.
    """
    array = fragment.array
    if array is None or len(array.shape) != 2 or len(fragment.box.shape) != 2:
        return None
    extent = array.extent
    is_dense = extent.strides in (None, c_strides(array.shape))
    n_pairs = (fragment.box.shape[0] - skipped) // 2
    if extent.encoding is not None or extent.axes is not None or not is_dense or n_pairs == 0:
        return None
    n_columns = array.shape[1]
    start = (fragment.at[0] + skipped) * n_columns
    return part_of(array, start, (n_pairs, 2 * n_columns))
