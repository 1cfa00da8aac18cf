"""Whether what all ranks say they hold makes whole tensors and objects: each part once, by one main replica.

Pure: it looks at metadata that was gathered before, so every rank that looks at the same comes to the same verdict.
Per key it costs the sort of its shards. Of many problems the first one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from core.arrays.box import Box
from core.arrays.coverage import first_hole, first_overlap
from core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from core.errors import UsageError

S = TypeVar("S", bound=ShardedBase)

_MAX_NAMED = 8
_MAX_SEARCHED = 2000
"""Boxes among which a hole is searched for a message; the search takes more than linear time."""

_TWICE = "give all but one of the copies a replica_id other than 0, or check the offsets"
_NOWHERE = "let one rank hold it with replica_id 0, or check the offsets and the number of shards"


class Held(NamedTuple, Generic[S]):
    """What a rank has of a key."""

    rank: int
    shard: S


def check_sharding(global_metadata: Sequence[Iterable[ShardedBase]]) -> None:
    """Raises unless main replicas hold every shard of every regular grid, and every object, once.

    Tensors without a regular grid are only compared between ranks; ``check_irregular`` looks at their regions.

    Args:
        global_metadata: by rank, what it holds; data is not looked at.

    Raises:
        UsageError: they do not; it names the key, the shard and the ranks.
    """
    for key, held in _by_key(global_metadata).items():
        if _are(held, ShardedTensor):
            _check_tensor(key, held)
        elif _are(held, ShardedObject):
            _check_object(key, held)
        else:
            _refuse_mixture(key, held)


def check_irregular(global_metadata: Sequence[Iterable[ShardedBase]]) -> None:
    """Raises unless the shards of tensors without a regular grid tile them; ``check_sharding`` comes before.

    Tensors that allow a shape mismatch may be covered in part.

    Raises:
        UsageError: shards overlap, or leave a hole.
    """
    for key, held in _by_key(global_metadata).items():
        if _are(held, ShardedTensor):
            first = held[0].shard
            if not first.has_regular_grid and not first.allow_shape_mismatch:
                _check_tiling(key, first, _main_chunks(held))


def _by_key(global_metadata: Sequence[Iterable[ShardedBase]]) -> dict[str, list[Held[ShardedBase]]]:
    found: dict[str, list[Held[ShardedBase]]] = {}
    for rank, shards in enumerate(global_metadata):
        for shard in shards:
            found.setdefault(shard.key, []).append(Held(rank, shard))
    return found


def _are(held: list[Held[Any]], kind: type[S]) -> TypeGuard[list[Held[S]]]:
    return all(isinstance(shard, kind) for _, shard in held)


def _refuse_mixture(key: str, held: list[Held[ShardedBase]]) -> None:
    kind = type(held[0].shard)
    other = next((one for one in held if type(one.shard) is not kind), held[0])
    raise UsageError(
        f"the key stands for a {kind.__name__} on rank {held[0].rank} and a {type(other.shard).__name__} on rank "
        f"{other.rank}",
        key=key,
        hint="give them keys of their own; factories have to be applied before this check",
    )


def _check_tensor(key: str, held: list[Held[ShardedTensor]]) -> None:
    _check_agreement(key, held)
    if 0 in held[0].shard.global_shape:
        return
    chunks = _main_chunks(held)
    for chunk, holders in chunks.items():
        _check_chunk(key, chunk, holders)
    if held[0].shard.has_regular_grid:
        _check_grid(key, held, list(chunks))


def _grid_of(shard: ShardedTensor) -> tuple[int, ...] | None:
    return None if shard.axis_fragmentations is None else tuple(shard.axis_fragmentations)


def _check_agreement(key: str, held: list[Held[ShardedTensor]]) -> None:
    """Raises where two ranks disagree about what has to be the same for all shards of a tensor."""
    facts: list[tuple[str, Callable[[ShardedTensor], object]]] = [
        ("dtype", lambda shard: shard.dtype),
        ("global shape", lambda shard: tuple(shard.global_shape)),
        ("regular grid (axis_fragmentations)", _grid_of),
        ("being flattened", lambda shard: shard.flattened_range is not None),
    ]
    if held[0].shard.has_regular_grid:
        facts.append(("local shape", lambda shard: tuple(shard.local_shape)))
    for name, fact in facts:
        expected = fact(held[0].shard)
        for rank, shard in held:
            if fact(shard) != expected:
                raise UsageError(
                    f"ranks disagree on the {name}: {expected} on rank {held[0].rank}, {fact(shard)} on rank {rank}",
                    key=key,
                    rank=str(rank),
                    hint="shards of one key have to belong to one global tensor",
                )


_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""A shard before flattening: where it begins in the global tensor, and its local shape."""


def _named(chunk: _Chunk) -> str:
    return f"shard of shape {chunk[1]} at {chunk[0]}"


def _main_chunks(held: Iterable[Held[ShardedTensor]]) -> dict[_Chunk, list[Held[ShardedTensor]]]:
    """The shards that main replicas hold, empty flattened ones left out, and who holds them."""
    found: dict[_Chunk, list[Held[ShardedTensor]]] = {}
    for one in held:
        flat = one.shard.flattened_range
        if is_main_replica(one.shard.replica_id) and (flat is None or flat.start < flat.stop):
            chunk = tuple(one.shard.global_offset), tuple(one.shard.local_shape)
            found.setdefault(chunk, []).append(one)
    return found


def _check_chunk(key: str, chunk: _Chunk, holders: list[Held[ShardedTensor]]) -> None:
    """Raises unless a shard has one main replica, or flattened ones that tile it."""
    if holders[0].shard.flattened_range is not None:
        _check_ranges(key, chunk, holders)
    elif len(holders) > 1:
        raise UsageError(
            f"the {_named(chunk)} has {len(holders)} main replicas, on ranks {_ranks(holders)}",
            key=key,
            rank=_ranks(holders),
            hint=_TWICE,
        )


def _check_ranges(key: str, chunk: _Chunk, holders: list[Held[ShardedTensor]]) -> None:
    ranges = sorted((flat.start, flat.stop, rank) for rank, shard in holders if (flat := shard.flattened_range))
    reached, last = 0, -1
    for start, stop, rank in ranges:
        if start < reached:
            raise UsageError(
                f"the flattened ranges of the {_named(chunk)} overlap: elements {start}–{min(stop, reached)} are held "
                f"by ranks {last} and {rank}",
                key=key,
                rank=f"{last}, {rank}",
                hint=_TWICE,
            )
        if start > reached:
            break
        reached, last = stop, rank
    size = prod(chunk[1])
    if reached < size:
        until = next((start for start, _, _ in ranges if start > reached), size)
        raise UsageError(
            f"no main replica holds elements {reached}–{until} of the flattened {_named(chunk)} of {size} elements; "
            f"ranks {_ranks(holders)} hold others",
            key=key,
            hint="the flattened ranges of all ranks have to tile the shard",
        )


def _check_grid(key: str, held: list[Held[ShardedTensor]], chunks: list[_Chunk]) -> None:
    """Raises unless the chunks are all chunks of the grid."""
    first = held[0].shard
    assert first.axis_fragmentations is not None, "the grid is regular"
    grid = tuple(first.axis_fragmentations)
    local = (1,) * first.prepend_axis_num + tuple(first.local_shape)
    filled = tuple(n * extent for n, extent in zip(grid, local, strict=True))
    if filled != tuple(first.global_shape) and not first.allow_shape_mismatch:
        raise UsageError(
            f"{grid} shards of shape {local} make a tensor of shape {filled}, not of the global shape "
            f"{tuple(first.global_shape)}",
            key=key,
            hint="correct the shapes, or set allow_shape_mismatch where the tensor is padded",
        )
    places = sorted(tuple(o // n if n else o for o, n in zip(chunk[0], local, strict=True)) for chunk in chunks)
    outside = next((place for place in places if any(i >= n for i, n in zip(place, grid, strict=True))), None)
    if outside is not None:
        raise UsageError(f"shard {outside} is outside the grid of {grid} shards", key=key, hint="check the offsets")
    if len(places) < prod(grid):
        missing = _first_missing(places, grid)
        raise UsageError(
            f"no main replica holds shard {missing} of the grid of {grid} shards"
            f" ({prod(grid) - len(places)} of {prod(grid)} are missing); {_copies(held, missing)}",
            key=key,
            hint=_NOWHERE,
        )


def _first_missing(places: list[tuple[int, ...]], grid: tuple[int, ...]) -> tuple[int, ...]:
    """The first index of a grid, in C order, that is not among those, which are sorted."""
    number = next(number for number, place in enumerate([*places, None]) if place != _index(number, grid))
    return _index(number, grid)


def _index(number: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a grid's cell by its number in C order."""
    found = []
    for extent in reversed(grid):
        number, index = divmod(number, extent)
        found.append(index)
    return tuple(reversed(found))


def _copies(held: list[Held[ShardedTensor]], place: tuple[int, ...]) -> str:
    """Who holds a shard of the grid though not as the main replica."""
    there = [one for one in held if one.shard.local_chunk_offset_in_global() == place]
    if not there:
        return "no rank holds a copy of it"
    return f"ranks {_ranks(there)} hold copies with replica ids {_some([one.shard.replica_id for one in there])}"


def _check_tiling(key: str, first: ShardedTensor, chunks: dict[_Chunk, list[Held[ShardedTensor]]]) -> None:
    leading = (1,) * first.prepend_axis_num
    held = [(Box(chunk[0], leading + chunk[1]), holders[0].rank) for chunk, holders in chunks.items()]
    held = [(box, rank) for box, rank in held if not box.is_empty]
    boxes = [box for box, _ in held]
    region = Box((0,) * len(first.global_shape), tuple(first.global_shape))
    outside = next(((box, rank) for box, rank in held if not region.contains(box)), None)
    if outside is not None:
        raise UsageError(
            f"the shard of shape {outside[0].shape} at {outside[0].offset} does not lie in the global shape "
            f"{region.shape}",
            key=key,
            rank=str(outside[1]),
        )
    pair = first_overlap(boxes)
    if pair is not None:
        (one, rank), (other, other_rank) = held[pair[0]], held[pair[1]]
        raise UsageError(
            f"main replicas overlap: the shard of shape {one.shape} at {one.offset} on rank {rank}, and that of shape "
            f"{other.shape} at {other.offset} on rank {other_rank}",
            key=key,
            rank=f"{rank}, {other_rank}",
            hint=_TWICE,
        )
    n_held = sum(box.n_elements for box in boxes)
    if n_held < region.n_elements:
        hole = first_hole(region, boxes) if len(boxes) <= _MAX_SEARCHED else None
        where = f": the first are those of shape {hole.shape} at {hole.offset}" if hole else ""
        raise UsageError(
            f"no main replica holds {region.n_elements - n_held} of {region.n_elements} elements{where}",
            key=key,
            hint=_NOWHERE,
        )


def _check_object(key: str, held: list[Held[ShardedObject]]) -> None:
    holders: dict[str, list[Held[ShardedObject]]] = {}
    shape = held[0].shard.global_shape
    for one in held:
        if tuple(one.shard.global_shape) != tuple(shape):
            raise UsageError(
                f"ranks disagree on the object's global shape: {shape} on rank {held[0].rank}, "
                f"{one.shard.global_shape} on rank {one.rank}",
                key=key,
                rank=str(one.rank),
            )
        if is_main_replica(one.shard.replica_id):
            holders.setdefault(one.shard.unique_key, []).append(one)
    for unique_key, ones in holders.items():
        if len(ones) > 1:
            raise UsageError(
                f"the object has {len(ones)} main replicas, on ranks {_ranks(ones)}",
                key=unique_key,
                rank=_ranks(ones),
                hint=_TWICE,
            )
    if len(holders) != prod(shape):
        there = _some(sorted(name.rpartition("/")[2] for name in holders))
        raise UsageError(
            f"of {prod(shape)} shards of the object, {prod(shape) - len(holders)} have no main replica; there are: "
            f"{there or 'none'}",
            key=key,
            hint=_NOWHERE,
        )


def _ranks(holders: Iterable[Held[S]]) -> str:
    return _some(sorted({one.rank for one in holders}))


def _some(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:_MAX_NAMED])) + (" …" if len(items) > _MAX_NAMED else "")
