"""The documented API of Megatron-Core's distributed checkpointing, on this project's engine."""

from core.errors import explain_missing_extra

with explain_missing_extra("core.dist_checkpointing"):
    import torch as _torch  # noqa: F401

from core.dist_checkpointing.core import check_is_distributed_checkpoint
from core.dist_checkpointing.import_hook import as_megatron
from core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from core.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "as_megatron",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
