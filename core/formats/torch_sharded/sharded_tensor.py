"""Parse the state of a ShardedTensor, which lists offset and size of every shard.

::

    ([Shard {"tensor", "metadata": ShardMetadata}, …],          the shards of this rank
     ShardedTensorMetadata {"shards_metadata": [ShardMetadata {"shard_offsets", "shard_sizes",
                                                               "placement": rank}, …],
                            "size": shape of the tensor, …},
     ProcessGroupState {"global_rank", "global_world_size", …}, sharding spec, flag)

Source: torch 2.13 ``torch/distributed/_shard/sharded_tensor/api.py``; files that it wrote, in
tests/golden/dtensor.tar.xz.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape
from core.errors import CorruptError
from core.formats.torch_sharded.local_part import (
    HeldArray,
    LocalPart,
    is_rank,
    plain_array,
    shape_of,
)
from core.formats.torch_sharded.mesh_cut import HeldBox
from core.pickle.inert import Inert, attributes

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray


def sharded_tensor_part(
    state: object, shape: Shape, arrays: Mapping[str, StoredArray]
) -> LocalPart:
    """Parse the state of a ShardedTensor; raises the errors of ``local_part``."""
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise CorruptError("a ShardedTensor is malformed")
    shards, metadata, group = state[0], attributes(state[1]), attributes(state[2]) or {}
    if metadata is None or shape_of(metadata.get("size"), "its size") != shape:
        raise CorruptError("a ShardedTensor has metadata of another tensor")
    rank, world_size = group.get("global_rank"), group.get("global_world_size")
    arrays_of_rank: list[HeldArray] = []
    for shard in shards:
        fields = _slots(shard)
        array = plain_array(fields.get("tensor"), arrays, "ShardedTensor")
        place = _slots(fields.get("metadata"))
        offset = shape_of(place.get("shard_offsets"), "the offset of a shard")
        sizes = shape_of(place.get("shard_sizes"), "the size of a shard")
        if not len(offset) == len(sizes) == len(shape) or array.shape != sizes:
            raise CorruptError(
                f"the shard of shape {sizes} at {offset} of a ShardedTensor has data of shape "
                f"{array.shape}"
            )
        if any(o + n > extent for o, n, extent in zip(offset, sizes, shape, strict=True)):
            raise CorruptError(
                f"the shard at {offset} of shape {sizes} is not in a ShardedTensor of shape {shape}"
            )
        if 0 not in sizes:
            box = HeldBox(Box(offset, sizes), (0,) * len(sizes))
            arrays_of_rank.append(HeldArray(array, (box,)))
    return LocalPart(
        "ShardedTensor",
        arrays_of_rank[0].array.dtype if arrays_of_rank else "",
        shape,
        tuple(arrays_of_rank),
        rank=rank if isinstance(rank, int) and is_rank(rank) else None,
        ranks=_ranks_of(metadata.get("shards_metadata"), world_size),
        cuts=_shards_text(metadata.get("shards_metadata")),
    )


def _slots(value: object) -> Mapping[str, object]:
    """Return the attributes of an object with slots, whose state is (None, attributes)."""
    state = value.state if isinstance(value, Inert) else None
    fields = state[1] if isinstance(state, tuple) and len(state) == 2 else state
    return fields if isinstance(fields, dict) else {}


def _ranks_of(shards: object, world_size: object) -> frozenset[int]:
    """Return the ranks of a ShardedTensor's process group."""
    if isinstance(world_size, int) and is_rank(world_size):
        return frozenset(range(world_size))
    ranks = [
        (attributes(_slots(shard).get("placement")) or {}).get("_rank")
        for shard in (shards if isinstance(shards, list) else ())
    ]
    return frozenset(rank for rank in ranks if isinstance(rank, int) and is_rank(rank))


def _shards_text(shards: object) -> str:
    """Return the number of shards of a ShardedTensor as text."""
    n_shards = len(shards) if isinstance(shards, list) else 0
    return f"{n_shards} shard{'' if n_shards == 1 else 's'}"
