"""Checks that the shards of all ranks form complete tensors and objects.

Each part must have one main replica. The checks are pure: they look at metadata that was gathered
before, so every rank with the same metadata comes to the same result. Their cost per key is the
sort of its shards. Of several problems the first one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from core.arrays.box import Box
from core.arrays.coverage import first_hole, first_overlap
from core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from core.errors import UsageError, list_some

S = TypeVar("S", bound=ShardedBase)

_MAX_SEARCHED = 2000
"""Maximum number of boxes for which an error locates a hole, which takes more than linear time."""

_DUPLICATE_HINT = "set a nonzero replica_id on all but one of the copies, or check the offsets"
_MISSING_HINT = (
    "make sure that one rank holds the missing data with replica_id 0, and check the offsets and "
    "the number of shards"
)


class RankShard(NamedTuple, Generic[S]):
    """A shard and the rank that holds it."""

    rank: int
    shard: S


def check_sharding(global_metadata: Sequence[Iterable[ShardedBase]]) -> None:
    """Raise unless every shard of every regular grid, and every object, has one main replica.

    Tensors without a regular grid are only compared between ranks; ``check_irregular`` checks their
    regions.

    Args:
        global_metadata: shards of each rank, by rank; their data is ignored.

    Raises:
        UsageError: a shard has no main replica or several, or ranks disagree about a tensor; the
            message names the key, the shard and the ranks.
    """
    for key, shards in _group_by_key(global_metadata).items():
        # All shards of a key must be of one kind.
        if _are(shards, ShardedTensor):
            _check_tensor(key, shards)
        elif _are(shards, ShardedObject):
            _check_object(key, shards)
        else:
            first = shards[0]
            kind = type(first.shard)
            other = next((shard for shard in shards if type(shard.shard) is not kind), first)
            raise UsageError(
                f"the key belongs to a {kind.__name__} on rank {first.rank}, but to a "
                f"{type(other.shard).__name__} on "
                f"rank {other.rank}",
                key=key,
                hint="use different keys, and apply factories before this check",
            )


def check_irregular(global_metadata: Sequence[Iterable[ShardedBase]]) -> None:
    """Raise unless the shards of tensors without a regular grid tile them.

    ``check_sharding`` has to come before. Tensors that allow a shape mismatch may be covered in
    part.

    Raises:
        UsageError: shards overlap, or leave a hole.
    """
    for key, shards in _group_by_key(global_metadata).items():
        if _are(shards, ShardedTensor):
            first = shards[0].shard
            if not first.has_regular_grid and not first.allow_shape_mismatch:
                _check_tiling(key, first, _main_chunks(shards))


def _group_by_key(
    global_metadata: Sequence[Iterable[ShardedBase]],
) -> dict[str, list[RankShard[ShardedBase]]]:
    groups: dict[str, list[RankShard[ShardedBase]]] = {}
    for rank, shards in enumerate(global_metadata):
        for shard in shards:
            groups.setdefault(shard.key, []).append(RankShard(rank, shard))
    return groups


def _are(shards: list[RankShard[Any]], kind: type[S]) -> TypeGuard[list[RankShard[S]]]:
    return all(isinstance(shard, kind) for _, shard in shards)


def _check_tensor(key: str, shards: list[RankShard[ShardedTensor]]) -> None:
    _check_agreement(key, shards)
    if 0 in shards[0].shard.global_shape:
        return
    chunks = _main_chunks(shards)
    for chunk, holders in chunks.items():
        # In an uneven division, several ranks may have a chunk without elements at the same offset.
        if holders[0].shard.flattened_range is not None:
            _check_ranges(key, chunk, holders)
        elif len(holders) > 1 and 0 not in chunk[1]:
            raise UsageError(
                f"the {_describe_chunk(chunk)} has {len(holders)} main replicas, on ranks "
                f"{_format_ranks(holders)}",
                key=key,
                rank=_format_ranks(holders),
                hint=_DUPLICATE_HINT,
            )
    if shards[0].shard.has_regular_grid:
        _check_grid(key, shards, list(chunks))


def _grid_of(shard: ShardedTensor) -> tuple[int, ...] | None:
    return None if shard.axis_fragmentations is None else tuple(shard.axis_fragmentations)


def _check_agreement(key: str, shards: list[RankShard[ShardedTensor]]) -> None:
    """Raise if two ranks disagree about a property that all shards of a tensor share.

    Raises:
        UsageError: dtype, global shape, grid, flattening or (in a regular grid) local shape differ.
    """
    properties: list[tuple[str, Callable[[ShardedTensor], object]]] = [
        ("dtype", lambda shard: shard.dtype),
        ("global shape", lambda shard: tuple(shard.global_shape)),
        ("regular grid (axis_fragmentations)", _grid_of),
        ("use of flattened_range", lambda shard: shard.flattened_range is not None),
    ]
    if shards[0].shard.has_regular_grid:
        properties.append(("local shape", lambda shard: tuple(shard.local_shape)))
    for name, value_of in properties:
        expected = value_of(shards[0].shard)
        for rank, shard in shards:
            value = value_of(shard)
            if value != expected:
                raise UsageError(
                    f"ranks disagree on the {name}: {expected} on rank {shards[0].rank}, but "
                    f"{value} on rank {rank}",
                    key=key,
                    rank=str(rank),
                    hint="use a different key for each tensor",
                )


_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""A shard before flattening: its offset in the global tensor, and its local shape."""


def _describe_chunk(chunk: _Chunk) -> str:
    return f"shard of shape {chunk[1]} at {chunk[0]}"


def _main_chunks(
    shards: Iterable[RankShard[ShardedTensor]],
) -> dict[_Chunk, list[RankShard[ShardedTensor]]]:
    """Return the chunks of main replicas and their holders, without empty flattened shards."""
    chunks: dict[_Chunk, list[RankShard[ShardedTensor]]] = {}
    for rank_shard in shards:
        shard = rank_shard.shard
        flat = shard.flattened_range
        if is_main_replica(shard.replica_id) and (flat is None or flat.start < flat.stop):
            chunk = tuple(shard.global_offset), tuple(shard.local_shape)
            chunks.setdefault(chunk, []).append(rank_shard)
    return chunks


def _check_ranges(key: str, chunk: _Chunk, holders: list[RankShard[ShardedTensor]]) -> None:
    ranges = sorted(
        (flat.start, flat.stop, rank) for rank, shard in holders if (flat := shard.flattened_range)
    )
    # Follow the ranges from the beginning of the chunk until one overlaps or leaves a hole.
    reached, last = 0, -1
    for start, stop, rank in ranges:
        if start < reached:
            raise UsageError(
                f"the flattened ranges of the {_describe_chunk(chunk)} overlap: ranks "
                f"{last} and {rank} both hold elements {start}–{min(stop, reached)}",
                key=key,
                rank=f"{last}, {rank}",
                hint=_DUPLICATE_HINT,
            )
        if start > reached:
            break
        reached, last = stop, rank
    size = prod(chunk[1])
    if reached < size:
        until = next((start for start, _, _ in ranges if start > reached), size)
        raise UsageError(
            f"no main replica holds elements {reached}–{until} of the flattened "
            f"{_describe_chunk(chunk)}, which has {size} elements; "
            f"ranks {_format_ranks(holders)} hold other elements",
            key=key,
            hint="make the ranks' flattened ranges cover the shard without gaps",
        )


def _check_grid(key: str, shards: list[RankShard[ShardedTensor]], chunks: list[_Chunk]) -> None:
    """Raise unless the chunks are all chunks of the tensor's regular grid.

    Args:
        key: name of the tensor.
        shards: all shards of the tensor.
        chunks: chunks that have a main replica.

    Raises:
        UsageError: the grid does not fit the global shape, or a chunk is outside of the grid or
            missing.
    """
    # The shards must fill the global shape exactly.
    first = shards[0].shard
    assert first.axis_fragmentations is not None, "the grid is regular"
    grid = tuple(first.axis_fragmentations)
    extents = (1,) * first.prepend_axis_num + tuple(first.local_shape)
    grid_shape = tuple(n * extent for n, extent in zip(grid, extents, strict=True))
    if grid_shape != tuple(first.global_shape) and not first.allow_shape_mismatch:
        raise UsageError(
            f"a grid of {grid} shards of shape {extents} has shape {grid_shape}, but the "
            f"global shape is {tuple(first.global_shape)}",
            key=key,
            hint="correct the shapes, or set allow_shape_mismatch if the tensor is padded",
        )
    # Every cell of the grid must have a chunk, and no chunk may be outside.
    cells = sorted(
        tuple(
            offset // extent if extent else offset
            for offset, extent in zip(chunk[0], extents, strict=True)
        )
        for chunk in chunks
    )
    for cell in cells:
        if any(index >= n for index, n in zip(cell, grid, strict=True)):
            raise UsageError(
                f"shard {cell} is outside the grid of {grid} shards",
                key=key,
                hint="check the offsets",
            )
    if len(cells) < prod(grid):
        in_c_order = (_unravel(number, grid) for number in range(prod(grid)))
        missing = next(
            cell for cell, other in zip(in_c_order, [*cells, None], strict=False) if cell != other
        )
        raise UsageError(
            f"no main replica holds shard {missing} of the grid of {grid} shards"
            f" ({prod(grid) - len(cells)} of {prod(grid)} missing); "
            f"{_describe_copies(shards, missing)}",
            key=key,
            hint=_MISSING_HINT,
        )


def _unravel(number: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of a grid's cell from its number in C order."""
    reversed_index = []
    for extent in reversed(grid):
        number, index = divmod(number, extent)
        reversed_index.append(index)
    return tuple(reversed(reversed_index))


def _describe_copies(shards: list[RankShard[ShardedTensor]], cell: tuple[int, ...]) -> str:
    """Describe the copies of a cell of the grid that are not main replicas."""
    copies = [
        rank_shard
        for rank_shard in shards
        if rank_shard.shard.local_chunk_offset_in_global() == cell
    ]
    if not copies:
        return "no rank holds a copy of that shard"
    replica_ids = list_some([copy.shard.replica_id for copy in copies])
    return f"ranks {_format_ranks(copies)} hold copies with replica ids {replica_ids}"


def _check_tiling(
    key: str, first: ShardedTensor, chunks: dict[_Chunk, list[RankShard[ShardedTensor]]]
) -> None:
    """Raise unless the chunks of a tensor tile it.

    Args:
        key: name of the tensor.
        first: one of its shards.
        chunks: chunks of main replicas, and their holders.

    Raises:
        UsageError: a chunk is outside of the tensor, two chunks overlap, or elements are in no
            chunk.
    """
    leading = (1,) * first.prepend_axis_num
    rank_of = {
        Box(chunk[0], leading + chunk[1]): holders[0].rank for chunk, holders in chunks.items()
    }
    boxes = [box for box in rank_of if not box.is_empty]
    region = Box((0,) * len(first.global_shape), tuple(first.global_shape))
    for box in boxes:
        if not region.contains(box):
            raise UsageError(
                f"the shard of shape {box.shape} at {box.offset} extends beyond the global "
                f"shape {region.shape}",
                key=key,
                rank=str(rank_of[box]),
            )
    overlap = first_overlap(boxes)
    if overlap is not None:
        box1, box2 = boxes[overlap[0]], boxes[overlap[1]]
        raise UsageError(
            f"main replicas overlap: the shard of shape {box1.shape} at {box1.offset} on rank "
            f"{rank_of[box1]}, and "
            f"the shard of shape {box2.shape} at {box2.offset} on rank {rank_of[box2]}",
            key=key,
            rank=f"{rank_of[box1]}, {rank_of[box2]}",
            hint=_DUPLICATE_HINT,
        )
    # Disjoint boxes inside the region tile it if they have as many elements.
    n_covered = sum(box.n_elements for box in boxes)
    if n_covered < region.n_elements:
        hole = first_hole(region, boxes) if len(boxes) <= _MAX_SEARCHED else None
        position = f"; the first gap has shape {hole.shape} at {hole.offset}" if hole else ""
        raise UsageError(
            f"no main replica holds {region.n_elements - n_covered} of the {region.n_elements} "
            f"elements{position}",
            key=key,
            hint=_MISSING_HINT,
        )


def _check_object(key: str, shards: list[RankShard[ShardedObject]]) -> None:
    """Raise unless every shard of an object has one main replica.

    Raises:
        UsageError: a shard has no main replica or several, or ranks disagree on the global shape.
    """
    # Find the main replicas of every shard.
    holders: dict[str, list[RankShard[ShardedObject]]] = {}
    shape = shards[0].shard.global_shape
    for rank_shard in shards:
        rank, shard = rank_shard
        if tuple(shard.global_shape) != tuple(shape):
            raise UsageError(
                f"ranks disagree on the object's global shape: {shape} on rank {shards[0].rank}, "
                f"but {shard.global_shape} on rank {rank}",
                key=key,
                rank=str(rank),
            )
        if is_main_replica(shard.replica_id):
            holders.setdefault(shard.unique_key, []).append(rank_shard)
    # Each shard must have exactly one.
    for unique_key, replicas in holders.items():
        if len(replicas) > 1:
            raise UsageError(
                f"the object has {len(replicas)} main replicas, on ranks {_format_ranks(replicas)}",
                key=unique_key,
                rank=_format_ranks(replicas),
                hint=_DUPLICATE_HINT,
            )
    if len(holders) != prod(shape):
        present = list_some(sorted(name.rpartition("/")[2] for name in holders))
        raise UsageError(
            f"no main replica holds {prod(shape) - len(holders)} of the object's {prod(shape)} "
            f"shards; the shards with a main replica are: {present or 'none'}",
            key=key,
            hint=_MISSING_HINT,
        )


def _format_ranks(holders: Iterable[RankShard[S]]) -> str:
    return list_some(sorted({holder.rank for holder in holders}))
