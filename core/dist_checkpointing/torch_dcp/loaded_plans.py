"""What each rank wrote of a loaded checkpoint, from Megatron's ``all_local_plans``."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from core.dist_checkpointing.torch_dcp.planned_save import chunk_of, is_tensor
from core.errors import UnsupportedError
from core.live.save import ProcessContribution


def contributions_of(metadata: Metadata | None) -> list[ProcessContribution] | None:
    """Return what each rank wrote, by rank; None if the metadata does not record it.

    The sizes of objects are 0, as plans do not contain them.

    Args:
        metadata: of a checkpoint, as ``read_torch_metadata`` or torch reads it.
    """
    plans = getattr(metadata, "all_local_plans", None)
    if not plans:
        return None
    try:
        return [
            ProcessContribution(
                chunks=tuple(chunk_of(item) for item in plan.items if is_tensor(item)),
                streams=tuple((item.index.fqn, 0) for item in plan.items if not is_tensor(item)),
            )
            for plan in plans
        ]
    except UnsupportedError:
        return None  # a dtype that this version does not save
