"""ShardedObjects of Megatron-core's distributed checkpoints.

A ShardedObject is an object with the key ``<key>/shard_<offset>_<shape>``, dots inside offset and
shape: one of a grid of objects, such as the random state of one rank. In a catalog its value is a
list of one, whatever the backend.

Source: ``ShardedObject.unique_key`` of megatron-core 0.12.1 to 0.20
    (``megatron/core/dist_checkpointing/mapping.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

_SHARDED_OBJECT = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(-?\d+(?:\.-?\d+)*)", re.DOTALL)
COMMON_OBJECT = "common_state/shard_0_1"
"""Holds the common state in checkpoints that have no ``common.pt``."""


def parts_of_sharded_object(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Return name, offset and shape in shards of a ShardedObject's key; None for another key."""
    match = _SHARDED_OBJECT.fullmatch(key)
    if match is None:
        return None
    offset, shape = (tuple(map(int, numbers.split("."))) for numbers in match.groups()[1:])
    return match[1], offset, shape


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

    def absent_keys(self) -> Iterator[str]:
        """Yield the keys of the missing shards."""
        if prod(self.shape) > len(self.offsets):
            for offset in product(*map(range, self.shape)):
                if offset not in self.offsets:
                    yield f"{self.name}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, self.shape))}"


def shard_grids(keys: Iterable[str]) -> list[ShardGrid]:
    """Return the grids that the keys of shards belong to; other keys are passed over."""
    offsets_of: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for key in keys:
        parts = parts_of_sharded_object(key)
        if parts is not None and len(parts[1]) == len(parts[2]) and min(parts[2]) > 0:
            offsets_of.setdefault((parts[0], parts[2]), set()).add(parts[1])
    return [
        ShardGrid(name, shape, frozenset(offsets)) for (name, shape), offsets in offsets_of.items()
    ]


def is_sharded_object(key: str) -> bool:
    """Return whether a key is ``<name>/shard_<offset>_<shape>``, dots inside offset and shape."""
    return parts_of_sharded_object(key) is not None
