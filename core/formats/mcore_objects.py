"""ShardedObjects of Megatron-core's distributed checkpoints.

A ShardedObject is an object with the key ``<key>/shard_<offset>_<shape>``, dots inside offset and shape: one of a grid
of objects, such as the random state of one rank. In a catalog its value is a list of one, whatever the backend.

Source: ``ShardedObject.unique_key`` of megatron-core 0.12.1 to 0.20 (``megatron/core/dist_checkpointing/mapping.py``).
"""

from __future__ import annotations

import re

_SHARDED_OBJECT = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(-?\d+(?:\.-?\d+)*)", re.DOTALL)
COMMON_OBJECT = "common_state/shard_0_1"
"""Holds the common state in checkpoints that have no ``common.pt``."""
_UNKNOWN = -1
"""The last number of a shape in the first checkpoints of this kind, whose names lacked it."""


def parts_of_sharded_object(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Name, offset and shape in shards, of a key ``<name>/shard_<offset>_<shape>``; None for another key."""
    found = _SHARDED_OBJECT.fullmatch(key)
    if found is None:
        return None
    offset, shape = (tuple(map(int, numbers.split("."))) for numbers in found.groups()[1:])
    return found[1], offset, shape


def is_sharded_object(key: str) -> bool:
    """Whether a key is ``<name>/shard_<offset>_<shape>``, dots inside offset and shape."""
    return parts_of_sharded_object(key) is not None
