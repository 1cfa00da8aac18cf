"""The geometry of sharding rules: pure integers in, boxes out.

One primitive covers nearly all rules, ``split_axis``: the global axis consists of k consecutive
parts, and shard r of n is the concatenation of the r-th n-th of every part::

    parts [6, 6], n = 2        global rows   0 1 2 | 3 4 5 || 6 7 8 | 9 10 11
    (a gated MLP's fc1)        shard 0       0 1 2            6 7 8
                               shard 1               3 4 5            9 10 11

Column parallel is one part on axis 0, row parallel is one part on axis 1; with replication every
shard is the complete tensor.

Source: Megatron-LM d98e8a64, ``core/resharding/planner.py``; checked against the mappings in
tests/golden/oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

from core.arrays.box import Box, Shape
from core.errors import UnsupportedError
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A region of the global tensor that is also one region of a shard.

    Args:
        box: the region in the global tensor, in elements.
        at: index of the region's first element in the shard.
    """

    box: Box
    at: Shape


def replicated_pieces(shape: Shape) -> list[ShardPiece]:
    """Return the only piece of a shard that is the complete tensor."""
    return [_full_piece(shape)]


@lru_cache(maxsize=1 << 14)
def _full_piece(shape: Shape) -> ShardPiece:
    """Build the piece of a complete tensor; cached, as a model has few different shapes."""
    origin = (0,) * len(shape)
    return ShardPiece(Box(origin, shape), origin)


def split_axis(
    shape: Shape, axis: int, *, parts: Sequence[int], rank: int, n: int
) -> list[ShardPiece]:
    """Return the pieces of shard ``rank`` of ``n``, in the order of the shard.

    Args:
        shape: global shape, in elements.
        axis: the axis that is split.
        parts: extents of the consecutive parts of that axis; each is a multiple of ``n``.

    Raises:
        ValueError: the parts do not add up to the extent, a part is not a multiple of ``n``, or
            ``rank`` is not below ``n``.
    """
    return list(_split(shape, axis, tuple(parts), rank, n))


@lru_cache(maxsize=1 << 14)
def _split(
    shape: Shape, axis: int, parts: tuple[int, ...], rank: int, n: int
) -> tuple[ShardPiece, ...]:
    """Compute ``split_axis``; cached, as the tensors of a model have few different shapes."""
    if sum(parts) != shape[axis] or any(part % n for part in parts) or not 0 <= rank < n:
        raise ValueError(
            f"cannot take shard {rank} of {n} from parts {list(parts)} along axis {axis} of {shape}"
        )
    origin = (0,) * len(shape)
    pieces = []
    part_start = local_start = 0
    for part in parts:
        extent = part // n
        offset = _with(origin, axis, part_start + rank * extent)
        pieces.append(
            ShardPiece(Box(offset, _with(shape, axis, extent)), _with(origin, axis, local_start))
        )
        part_start += part
        local_start += extent
    return tuple(pieces)


def shard_shape(shape: Shape, axis: int | None, n: int) -> Shape:
    """Return the shape of one of ``n`` equal shards; ``axis`` None means replication."""
    return shape if axis is None else _with(shape, axis, shape[axis] // n)


def global_shape(shape: Shape, axis: int | None, n: int) -> Shape:
    """Return the shape of a tensor from that of one of its ``n`` equal shards."""
    return shape if axis is None else _with(shape, axis, shape[axis] * n)


def check_divides(parts: Sequence[int], n: int, *, key: str, axis: int, group: str) -> None:
    """Raise unless every part of an axis can be cut into ``n`` equal shards.

    Args:
        parts: extents of the parts of the axis, in elements.
        n: the requested number of shards.
        key, axis, group: tensor, axis and parallel group (such as ``TP``), for the message.

    Raises:
        UnsupportedError: a part is not a multiple of ``n``; the hint lists the sizes that work.
    """
    for part in parts:
        if part % n:
            common = gcd(*parts)
            raise UnsupportedError(
                f"{part} elements of axis {axis} are not divisible by {group} {n}",
                key=key,
                hint=f"{group} sizes that work: {join_numbers(divisors(common))}",
            )


def trim_piece(piece: ShardPiece, axis: int, stop: int) -> ShardPiece | None:
    """Return the part of a piece below global index ``stop`` of ``axis``, or None if empty."""
    start = piece.box.offset[axis]
    if start >= stop:
        return None
    extent = min(piece.box.shape[axis], stop - start)
    return ShardPiece(Box(piece.box.offset, _with(piece.box.shape, axis, extent)), piece.at)


def padded_vocab_size(n_rows: int, *, divisible_by: int, tp: int) -> int:
    """Return the rows of a vocabulary after Megatron's padding.

    Megatron pads to the next multiple of ``divisible_by * tp``.

    Source: Megatron-LM d98e8a64 ``core/tokenizers/utils/build_tokenizer.py``
    ``vocab_size_with_padding``.
    """
    multiple = divisible_by * tp
    return -(-n_rows // multiple) * multiple


def check_heads(*, n_heads: int, n_groups: int, tp: int, key: str) -> None:
    """Raise unless Megatron's attention can be cut into ``tp`` shards.

    The number of query heads must be a multiple of TP. The number of query groups (key and value
    heads) must be a multiple or a divisor of TP: if TP is larger, a rank holds a fraction of a
    group's fused rows, which are still consecutive rows.

    Raises:
        UnsupportedError: the heads or groups do not fit; the hint lists the TP sizes that work.

    Source: Megatron-LM d98e8a64 ``core/transformer/attention.py`` (TP above the groups:
    megatron-core 0.16 and later).
    """

    def fits(size: int) -> bool:
        return n_heads % size == 0 and (n_groups % size == 0 or size % n_groups == 0)

    if fits(tp):
        return
    if n_heads % tp:
        problem = f"{n_heads} attention heads are not divisible by TP {tp}"
    else:
        problem = f"TP {tp} is neither a divisor nor a multiple of the {n_groups} query groups"
    sizes = [size for size in divisors(n_heads) if fits(size)]
    raise UnsupportedError(problem, key=key, hint=f"TP sizes that work: {join_numbers(sizes)}")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number >= 0, in order; for 0, which every number divides, [1]."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}) or [1]


def join_numbers(numbers: Sequence[int]) -> str:
    """Join numbers for a message, without the middle of a long list."""
    if len(numbers) > 16:
        return ", ".join(map(str, numbers[:12])) + f", … {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _with(values: Shape, axis: int, value: int) -> Shape:
    """Return a tuple with one number replaced."""
    return (*values[:axis], value, *values[axis + 1 :])
