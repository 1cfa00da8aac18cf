"""A small sharded state for the tests of the zarr backend, in three layouts, and what it must be
when it is back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.strategies.zarr import (
    ZarrSaveShardedStrategy,
    _create_zarr_array,
    _save_to_existing_array,
)
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of

SHAPES = {
    "embedding": ((12, 8), torch.float32),
    "layers.fc1": ((4, 8, 6), torch.bfloat16),
    "layers.norm": ((4, 6), torch.float32),
    "group/moment": ((8, 6), torch.float32),
    "mask": ((4,), torch.bool),
    "scale": ((4, 8), torch.float8_e4m3fn),
    "counts": ((8, 2), torch.int64),
    "step": ((), torch.int64),
    "nothing": ((0, 3), torch.float16),
}
CUTS = {1: (0, 48), 2: (0, 17, 48), 4: (0, 5, 17, 17, 48)}
"""Where the flattened moment is cut, by ranks; one rank of four holds nothing of it."""


def state(rank: int, world: int, *, is_filled: bool = True) -> dict[str, Any]:
    """What a rank of 1, 2 (TP) or 4 (TP × PP) holds; replicas where a tensor is not cut."""
    tp, pp = min(world, 2), max(world // 2, 1)
    tp_rank, pp_rank = rank % tp, rank // tp
    layers = range(pp_rank * 4 // pp, (pp_rank + 1) * 4 // pp)
    cut = CUTS[world]
    return {
        "embedding": part_of(
            "embedding", (12, 8), (0, rank, world), is_filled=is_filled, allow_shape_mismatch=True
        ),
        "layers": [
            {
                "fc1": _part(
                    "layers.fc1", (0, layer, 4), (1, tp_rank, tp), prepended=1, is_filled=is_filled
                ),
                "norm": _part(
                    "layers.norm",
                    (0, layer, 4),
                    prepended=1,
                    is_filled=is_filled,
                    replica_id=tp_rank,
                ),
            }
            for layer in layers
        ],
        "moment": flat_part_of(
            "group/moment", (8, 6), cut[rank], cut[rank + 1], is_filled=is_filled
        ),
        "mask": _part("mask", (0, rank, world), is_filled=is_filled),
        "scale": _part("scale", (1, rank, world), is_filled=is_filled),
        "counts": _part("counts", (0, tp_rank, tp), is_filled=is_filled, replica_id=(0, pp_rank)),
        "step": _part("step", is_filled=is_filled, replica_id=rank),
        "nothing": _part("nothing", is_filled=is_filled, replica_id=rank),
    }


def _part(key: str, *offsets: tuple[int, int, int], **options: Any) -> ShardedTensor:
    shape, dtype = SHAPES[key]
    return part_of(key, shape, *offsets, dtype=dtype, **options)


def save(rank: int, world: int, root: str) -> None:
    """One rank's part of saving the state."""
    ZarrSaveShardedStrategy("zarr", 1).save(state(rank, world), Path(root))


def save_columns(root: Path) -> None:
    """One tensor ``w`` of shape (6, 8), in two chunks of columns, by one process."""
    parts = [part_of("w", (6, 8), (1, column, 2)) for column in range(2)]
    array = _create_zarr_array(parts[0], root)
    for part in parts:
        _save_to_existing_array(part, array)


def check_loaded(loaded: Any, rank: int, world: int) -> None:
    """Returns if every leaf is the tensor that the state had, bit for bit."""
    expected = list(nested_values(state(rank, world)))
    tensors = list(nested_values(loaded))
    assert len(tensors) == len(expected)
    for tensor, part in zip(tensors, expected, strict=True):
        assert isinstance(tensor, torch.Tensor), part.key
        assert (tensor.dtype, tensor.shape) == (part.dtype, part.data.shape), part.key
        assert bits(tensor) == bits(part.data), part.key


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in C order."""
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def global_bits(key: str) -> bytes:
    """The bytes of a global tensor's elements in C order."""
    return bits(global_tensor(key, *SHAPES[key]))
