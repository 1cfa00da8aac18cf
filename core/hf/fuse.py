"""Fuse and take apart tensors that Megatron holds as one and Hugging Face as several.

Rows of a fused tensor of H heads in G groups, each of which shares one key and one value head::

    qkv     [ q0 … | k0 | v0 ][ q … | k1 | v1 ] …     per group: H / G query heads, a key head, a value head
    gated   [ gate rows ][ up rows ]

Both are lists of ``Strip``: rows of a part that are rows of the fused tensor, which can be read in
both directions. Everything stays a box; no element changes its place within a row.
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
        n_rows: number of rows.
    """

    part: int
    part_row: int
    row: int
    n_rows: int


def interleave_by_group(extents: Sequence[int], n_groups: int) -> list[Strip]:
    """Return the strips of parts that are interleaved by group.

    The first group's rows of every part come first, then the second's …; with one group, the parts
    follow each other.

    Args:
        extents: rows of each part, multiples of ``n_groups``.

    Raises:
        ValueError: an extent is not a multiple of ``n_groups``.
    """
    if n_groups < 1 or any(extent % n_groups for extent in extents):
        raise ValueError(f"{list(extents)} rows do not divide into {n_groups} groups")
    strips = []
    row = 0
    for group in range(n_groups):
        for part, extent in enumerate(extents):
            share = extent // n_groups
            strips.append(Strip(part, group * share, row, share))
            row += share
    return strips


def fuse_parts(
    key: str, strips: Iterable[Strip], parts: Sequence[Sequence[Fragment]]
) -> list[Fragment]:
    """Return the fragments of a fused tensor.

    Args:
        key: name of the fused tensor.
        parts: fragments of each part.
    """
    return [
        moved
        for strip in strips
        for piece in parts[strip.part]
        if (moved := _moved(piece, key, start=strip.part_row, n_rows=strip.n_rows, to=strip.row))
        is not None
    ]


def take_apart(
    key: str, strips: Iterable[Strip], part: int, pieces: Sequence[Fragment]
) -> list[Fragment]:
    """Return the fragments of one part of a fused tensor.

    Args:
        key: name of the part.
        part: number of the part.
        pieces: fragments of the fused tensor.
    """
    return [
        moved
        for strip in strips
        if strip.part == part
        for piece in pieces
        if (moved := _moved(piece, key, start=strip.row, n_rows=strip.n_rows, to=strip.part_row))
        is not None
    ]


def first_rows(key: str, pieces: Iterable[Fragment], n_rows: int) -> list[Fragment]:
    """Return the fragments of the first rows of a tensor."""
    return [
        moved
        for piece in pieces
        if (moved := _moved(piece, key, start=0, n_rows=n_rows, to=0)) is not None
    ]


def take_from_stack(key: str, pieces: Iterable[Fragment], index: int) -> Iterator[Fragment]:
    """Yield the fragments of entry ``index`` of a tensor that stacks entries on its first axis."""
    for piece in pieces:
        moved = _moved(piece, key, start=index, n_rows=1, to=0)
        if moved is not None:
            yield replace(moved, box=Box(moved.box.offset[1:], moved.box.shape[1:]))


def _moved(piece: Fragment, key: str, *, start: int, n_rows: int, to: int) -> Fragment | None:
    """Return the rows ``[start, start + n_rows)`` of a fragment, moved to row ``to``.

    Returns:
        None if it has no such rows.
    """
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
    """Return where in its array a fragment begins without its first ``rows`` rows."""
    axis = (
        len(piece.at) - piece.box.rank
    )  # axis of the rows in the array; both are aligned at the last axis
    if not rows or axis < 0:
        return piece.at
    return (*piece.at[:axis], piece.at[axis] + rows, *piece.at[axis + 1 :])
