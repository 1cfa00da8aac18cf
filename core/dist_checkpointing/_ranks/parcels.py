"""What one rank sends to others at once: a large shard, or several small ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from core.dist_checkpointing._ranks.shard_bytes import copy_bytes, own_bytes
from core.dist_checkpointing.utils import _ShardId

PARCEL_BYTES = 4 << 20
"""Shards that fit in together travel together: a message has its own cost, about that of 1 MiB."""

_ALIGNMENT = 16


class Parcel(NamedTuple):
    """Shards that travel together.

    Args:
        main_rank: rank of the group that has loaded them.
        starts: shard → where its bytes begin; any dtype may begin there.
        n_bytes: of all of it, gaps between the shards included.
    """

    main_rank: int
    starts: dict[_ShardId, int]
    n_bytes: int


def parcels_of(sizes: Mapping[_ShardId, int], main_rank: Mapping[_ShardId, int]) -> list[Parcel]:
    """All shards in parcels, the largest of each rank first. A function of the arguments' items, not of their order.

    Args:
        sizes: shard → bytes; empty ones do not travel.
        main_rank: shard → rank of the group that has loaded it.
    """
    found: list[Parcel] = []
    travelling = [shard for shard, size in sizes.items() if size]
    for shard in sorted(travelling, key=lambda shard: (main_rank[shard], -sizes[shard], comparable(shard))):
        last = found[-1] if found else None
        start = _aligned(last.n_bytes) if last is not None else 0
        if last is not None and last.main_rank == main_rank[shard] and start + sizes[shard] <= PARCEL_BYTES:
            last.starts[shard] = start
            found[-1] = last._replace(n_bytes=start + sizes[shard])
        else:
            found.append(Parcel(main_rank[shard], {shard: 0}, sizes[shard]))
    return found


def comparable(shard: Any) -> Any:
    """A shard's id as something that can be ordered: a part that is None (no flattened range) before all tuples."""
    return tuple(() if part is None else part for part in shard) if isinstance(shard, tuple) else shard


def row_bytes(row: Iterable[Parcel | None]) -> int:
    """Bytes that hold any one parcel of the row, so many that any dtype may begin after them."""
    return max(_aligned(parcel.n_bytes) for parcel in row if parcel is not None)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def in_place(parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The bytes of a parcel where they lie; None if they must be put together, or are not among the tensors."""
    if len(parcel.starts) > 1:
        return None
    (shard,) = parcel.starts
    return own_bytes(tensors.get(shard), device)


def pack(parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], raw: torch.Tensor) -> None:
    """Copies the tensors of a parcel to the beginning of ``raw``, 1-D uint8."""
    for shard, start in parcel.starts.items():
        copy_bytes(tensors[shard], raw[start:], is_received=False)


def unpack(parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], raw: torch.Tensor) -> None:
    """Fills those of the tensors that are in the parcel from the beginning of ``raw``, 1-D uint8."""
    for shard, start in parcel.starts.items():
        if shard in tensors:
            copy_bytes(tensors[shard], raw[start:], is_received=True)
