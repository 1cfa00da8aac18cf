"""A local checkpoint of two ranks, in the files that nvidia-resiliency-ext's manager writes.

The classes are megatron-core's; tests that use them are skipped where it is not installed.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

WEIGHT = torch.arange(24.0).reshape(6, 4)
LAYERS = torch.arange(12).reshape(2, 6).to(torch.bfloat16)


def state_of(rank: int, *, scale: float = 1.0) -> Any:
    """The object of one of two ranks: half of a weight, one of two layers, and one of two replicas.

    Rank 0 keeps the replicated tensor, as with the algorithm fully_parallel.
    """
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    module = pytest.importorskip("megatron.core.dist_checkpointing.tensor_aware_state_dict")
    sharded_tensor = mapping.ShardedTensor.from_rank_offsets
    norm = sharded_tensor("norm", torch.ones(3) * scale, replica_id=rank)
    if rank:
        norm.data = None
    return module.MCoreTensorAwareStateDict(
        common={"iteration": 7, "args": Namespace(num_layers=2), "seed": torch.tensor([3])},
        sharded_state_dict={
            "model": [
                sharded_tensor("weight", WEIGHT[3 * rank : 3 * rank + 3] * scale, (0, rank, 2)),
                sharded_tensor("layers", LAYERS[rank], (0, rank, 2), prepend_axis_num=1),
            ],
            "norm": norm,
            "rng": mapping.ShardedObject("rng", {"n": torch.tensor(rank)}, (2,), (rank,)),
        },
    )


def saved(folder: Path, *, iteration: int = 7, scale: float = 1.0) -> Path:
    """Save both ranks' files, and a replica of rank 0's in rank 1's directory."""
    for rank in range(2):
        (folder / str(rank)).mkdir(parents=True, exist_ok=True)
        state = state_of(rank, scale=scale)
        torch.save(state, folder / f"{rank}/iter_{iteration:07}_{rank}_local.pt")
    shutil.copy(folder / f"0/iter_{iteration:07}_0_local.pt", folder / "1")
    return folder
