"""The documented API of Megatron-Core's distributed checkpointing, on this project's engine; see core/README.md."""

from core.dist_checkpointing.core import check_is_distributed_checkpoint
from core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
]
