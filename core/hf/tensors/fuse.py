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

from collections.abc import Iterable, Sequence

from core.arrays.box import Shape
from core.engine.catalog.tensor import Fragment, Tensor, clip_fragment, concat
from core.values import dataclass


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
        raise ValueError(
            f"parts of {', '.join(map(str, extents))} rows cannot be divided evenly into "
            f"{n_groups} groups"
        )
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


def fuse_parts(strips: Iterable[Strip], parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Return the tensor that consists of rows of several.

    Args:
        strips: which rows of which part are which rows of the tensor.
        parts: tensors of one dtype.
        shape: shape of the tensor.
    """
    strips = tuple(strips)

    def fragments() -> list[Fragment]:
        stored = [part.fragments() for part in parts]
        return [
            moved
            for strip in strips
            for fragment in stored[strip.part]
            if (
                moved := clip_fragment(
                    fragment, start=strip.part_row, extent=strip.n_rows, to=strip.row
                )
            )
            is not None
        ]

    return Tensor(parts[0].dtype, shape, fragments)


def take_apart(strips: Iterable[Strip], part: int, fused: Tensor, shape: Shape) -> Tensor:
    """Return one of the tensors whose rows a fused tensor has.

    Args:
        strips: as for ``fuse_parts``.
        part: number of the part.
        fused: the fused tensor.
        shape: shape of the part.
    """
    inverse = [
        Strip(0, strip.row, strip.part_row, strip.n_rows) for strip in strips if strip.part == part
    ]
    return fuse_parts(inverse, [fused], shape)


def swap_halves(tensor: Tensor) -> Tensor:
    """Return a matrix with the halves of its columns, an even number, exchanged."""
    half = tensor.shape[1] // 2
    return concat([tensor.narrow(1, half, half), tensor.narrow(1, 0, half)], axis=1)
