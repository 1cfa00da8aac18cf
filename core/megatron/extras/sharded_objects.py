"""ShardedObjects in Megatron-core's distributed checkpoints.

A ShardedObject is one of a grid of objects, such as the random state of one rank. Its key is
``<name>/shard_<offset>_<shape>``, with dots inside offset and shape: ``rng_state/shard_0.1_2.4``.
In a catalog, its value is a list with one element, whatever the backend.

Source: ``ShardedObject.unique_key`` of megatron-core 0.12.1 to 0.20
    (``megatron/core/dist_checkpointing/mapping.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod

from core.values import dataclass

_SHARDED_OBJECT = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(-?\d+(?:\.-?\d+)*)", re.DOTALL)
COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the common state in checkpoints that have no ``common.pt``."""


def split_sharded_key(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Split a ShardedObject's key into name, offset, shape (in shards); None for another key."""
    match = _SHARDED_OBJECT.fullmatch(key)
    if match is None:
        return None
    offset, shape = (tuple(map(int, numbers.split("."))) for numbers in match.groups()[1:])
    return match[1], offset, shape


def sharded_object(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Split the key of a shard of a grid; None also for numbers that no grid can have."""
    parts = split_sharded_key(key)
    if parts is None or len(parts[1]) != len(parts[2]):
        return None
    is_inside = all(offset < n for offset, n in zip(parts[1], parts[2], strict=True))
    return parts if is_inside else None


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The shards of one ShardedObject, some of which exist.

    Args:
        name: name of the object.
        shape: shape of the grid, in shards.
        offsets: offsets of the shards that exist.
    """

    name: str
    shape: tuple[int, ...]
    offsets: frozenset[tuple[int, ...]]

    def absent_keys(self, at_most: int) -> Iterator[str]:
        """Yield the keys of the missing shards, in order; a key may claim any number of shards."""
        indices = range(min(prod(self.shape), len(self.offsets) + at_most))
        offsets = (_unravel(index, self.shape) for index in indices)
        for offset in islice((o for o in offsets if o not in self.offsets), at_most):
            dotted_offset, dotted_shape = (
                ".".join(map(str, numbers)) for numbers in (offset, self.shape)
            )
            yield f"{self.name}/shard_{dotted_offset}_{dotted_shape}"


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position of an index in a grid in C order, as ``np.unravel_index``.

    NumPy refuses grids of more than 2**63 places.
    """
    offset = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        offset.append(remainder)
    return tuple(reversed(offset))


def shard_grids(keys: Iterable[str]) -> list[ShardGrid]:
    """Return the grids of the ShardedObjects among some keys; other keys are ignored."""
    offsets_of: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for key in keys:
        if shard := sharded_object(key):
            offsets_of.setdefault((shard[0], shard[2]), set()).add(shard[1])
    return [
        ShardGrid(name, shape, frozenset(offsets)) for (name, shape), offsets in offsets_of.items()
    ]


def is_sharded_object(key: str) -> bool:
    """Return whether a key is that of a ShardedObject, ``<name>/shard_<offset>_<shape>``."""
    return split_sharded_key(key) is not None
