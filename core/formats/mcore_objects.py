"""ShardedObjects of Megatron-core's distributed checkpoints.

A ShardedObject is an object with the key ``<key>/shard_<offset>_<shape>``, dots inside offset and shape: one of a grid
of objects, such as the random state of one rank. In a catalog its value is a list of one, whatever the backend.

Source: ``ShardedObject.unique_key`` of megatron-core 0.12.1 to 0.20 (``megatron/core/dist_checkpointing/mapping.py``).
"""

from __future__ import annotations

import re

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(\.\d+)*_\d+(\.\d+)*$")


def is_sharded_object(key: str) -> bool:
    """Whether a key is ``<name>/shard_<offset>_<shape>``, dots inside offset and shape."""
    return _SHARDED_OBJECT.search(key) is not None
