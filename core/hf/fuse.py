"""The geometry of tensors that Megatron holds as one and Hugging Face as several.

Rows of a fused tensor of H heads in G groups, of which each shares one key and one value head::

    qkv     [ q0 … | k0 | v0 ][ q … | k1 | v1 ] …     per group: H / G query heads, a key head, a value head
    gated   [ gate rows ][ up rows ]

Both are lists of ``Strip``: so many rows of a part are so many rows of the whole. Read one way they fuse, read the
other way they take apart. Everything stays a box, no element changes its place within a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, Shape
from core.catalog.catalog import Fragment


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive rows of a part that are consecutive rows of the fused tensor.

    Args:
        part: number of the part.
        part_row: first row in the part.
        row: first row in the fused tensor.
        n_rows: how many.
    """

    part: int
    part_row: int
    row: int
    n_rows: int


def by_groups(extents: Sequence[int], n_groups: int) -> list[Strip]:
    """Parts dealt out group by group: the first group's rows of every part, then the second's …

    With one group, the parts are one after the other.

    Args:
        extents: rows of each part, multiples of ``n_groups``.

    Raises:
        ValueError: an extent is not a multiple.
    """
    if n_groups < 1 or any(extent % n_groups for extent in extents):
        raise ValueError(f"{list(extents)} rows are not those of {n_groups} groups")
    strips = []
    row = 0
    for group in range(n_groups):
        for part, extent in enumerate(extents):
            share = extent // n_groups
            strips.append(Strip(part, group * share, row, share))
            row += share
    return strips


def fused(key: str, strips: Iterable[Strip], parts: Sequence[Sequence[Fragment]]) -> list[Fragment]:
    """The fragments of a fused tensor.

    Args:
        key: its key.
        parts: the fragments of each part.
    """
    return [
        moved
        for strip in strips
        for piece in parts[strip.part]
        if (moved := _moved(piece, key, start=strip.part_row, n_rows=strip.n_rows, to=strip.row)) is not None
    ]


def taken_apart(key: str, strips: Iterable[Strip], part: int, whole: Sequence[Fragment]) -> list[Fragment]:
    """The fragments of one part.

    Args:
        key: the part's key.
        part: its number.
        whole: the fragments of the fused tensor.
    """
    return [
        moved
        for strip in strips
        if strip.part == part
        for piece in whole
        if (moved := _moved(piece, key, start=strip.row, n_rows=strip.n_rows, to=strip.part_row)) is not None
    ]


def first_rows(key: str, pieces: Iterable[Fragment], n_rows: int) -> list[Fragment]:
    """The fragments of a tensor's first rows."""
    return [moved for piece in pieces if (moved := _moved(piece, key, start=0, n_rows=n_rows, to=0)) is not None]


def one_of_stack(key: str, pieces: Iterable[Fragment], index: int) -> Iterator[Fragment]:
    """The fragments of entry ``index`` of a tensor that stacks entries on its first axis."""
    for piece in pieces:
        moved = _moved(piece, key, start=index, n_rows=1, to=0)
        if moved is not None:
            yield replace(moved, box=Box(moved.box.offset[1:], moved.box.shape[1:]))


def _moved(piece: Fragment, key: str, *, start: int, n_rows: int, to: int) -> Fragment | None:
    """What of a fragment lies in rows ``[start, start + n_rows)``, with row ``start`` moved to row ``to``."""
    box = piece.box
    first = max(start, box.offset[0])
    stop = min(start + n_rows, box.end[0])
    if stop <= first:
        return None
    return Fragment(
        key,
        Box((first - start + to, *box.offset[1:]), (stop - first, *box.shape[1:])),
        piece.array,
        _later(piece, first - box.offset[0]),
    )


def _later(piece: Fragment, rows: int) -> Shape:
    """Where in its array a fragment begins if its first ``rows`` rows are left out."""
    axis = len(piece.at) - piece.box.rank  # of the rows, in the array; both are aligned at the last axis
    if not rows or axis < 0:
        return piece.at
    return (*piece.at[:axis], piece.at[axis] + rows, *piece.at[axis + 1 :])
