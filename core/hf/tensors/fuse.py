"""Fuse and split tensors that Megatron stores as one and Hugging Face as several.

Rows of a fused tensor of H heads in G groups, each of which shares one key and one value head::

    qkv     [ q0 … | k0 | v0 ][ q … | k1 | v1 ] …     per group: H / G query heads, one key head,
                                                      one value head
    gated   [ gate rows ][ up rows ]

    gate    [ q0 … | g0 … | k0 | v0 ] …     as qkv, where q_proj holds q and g of each head

Both are lists of ``Strip``, which map rows of a part to rows of the fused tensor and work in both
directions. Every strip is a box: the order of the elements within a row does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box
from core.catalog.catalog import Catalog, Fragment, clip_fragment


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

    The rows of all parts in the first group come first, then those in the second group, and so on.
    With one group, the parts are simply concatenated.

    Args:
        extents: number of rows of each part, multiples of ``n_groups``.

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


def chain_strips(
    strips: Iterable[Strip], stored: Sequence[Sequence[Strip]], tensor_of: Sequence[int]
) -> list[Strip]:
    """Return strips of stored tensors, given those of parts that alternate in these tensors.

    Args:
        strips: strips that map rows of a part to rows of the fused tensor.
        stored: for each part, the strips that map its rows to rows of the tensor that stores it.
        tensor_of: for each part, the number of that tensor.
    """
    result = []
    for strip in strips:
        for piece in stored[strip.part]:
            start = max(strip.part_row, piece.part_row)
            stop = min(strip.part_row + strip.n_rows, piece.part_row + piece.n_rows)
            if start < stop:
                row = piece.row + start - piece.part_row
                to = strip.row + start - strip.part_row
                result.append(Strip(tensor_of[strip.part], row, to, stop - start))
    return result


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
        for fragment in parts[strip.part]
        if (
            moved := clip_fragment(
                fragment, key, start=strip.part_row, extent=strip.n_rows, to=strip.row
            )
        )
        is not None
    ]


def take_apart(
    key: str, strips: Iterable[Strip], part: int, fragments: Sequence[Fragment]
) -> list[Fragment]:
    """Return the fragments of one part of a fused tensor.

    Args:
        key: name of the part.
        part: number of the part.
        fragments: the fragments of the fused tensor.
    """
    return [
        moved
        for strip in strips
        if strip.part == part
        for fragment in fragments
        if (
            moved := clip_fragment(
                fragment, key, start=strip.row, extent=strip.n_rows, to=strip.part_row
            )
        )
        is not None
    ]


def first_rows(key: str, fragments: Iterable[Fragment], n_rows: int) -> list[Fragment]:
    """Return the fragments of the first rows of a tensor."""
    return [
        moved
        for fragment in fragments
        if (moved := clip_fragment(fragment, key, start=0, extent=n_rows, to=0)) is not None
    ]


def take_from_stack(catalog: Catalog, stack: str, index: int, *, key: str) -> Iterator[Fragment]:
    """Yield the fragments of entry ``index`` of a tensor stacked along its first axis.

    Args:
        catalog, stack, index: the tensor and the entry.
        key: name of the entry.
    """
    for fragment in catalog.entry_fragments(stack, index):
        moved = clip_fragment(fragment, key, start=index, extent=1, to=0)
        if moved is not None:
            yield replace(moved, box=Box(moved.box.offset[1:], moved.box.shape[1:]))


def with_first_axis(key: str, fragments: Iterable[Fragment], index: int = 0) -> list[Fragment]:
    """Return the fragments of a tensor that becomes an entry of another first axis.

    Args:
        key: name of the tensor with that axis.
        index: number of the entry.
    """
    return [
        replace(fragment, key=key, box=Box((index, *fragment.box.offset), (1, *fragment.box.shape)))
        for fragment in fragments
    ]


def swap_halves(fragments: Iterable[Fragment], n_columns: int) -> list[Fragment]:
    """Return the fragments of a matrix with the halves of its columns exchanged.

    Args:
        fragments: the fragments of the matrix.
        n_columns: number of its columns, an even number.
    """
    half = n_columns // 2
    result = []
    for fragment in fragments:
        (row, column), (n_rows, _) = fragment.box.offset, fragment.box.shape
        for start, to in ((0, half), (half, 0)):
            first, stop = max(start, column), min(start + half, fragment.box.end[1])
            if first < stop:
                box = Box((row, first - start + to), (n_rows, stop - first))
                # Array and fragment are aligned at the last axis.
                at = (*fragment.at[:-1], fragment.at[-1] + first - column) if fragment.at else ()
                result.append(Fragment(fragment.key, box, fragment.array, at))
    return result
