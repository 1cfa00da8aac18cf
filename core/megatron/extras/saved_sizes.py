"""The parallel sizes of the run that saved a torch_dist checkpoint, where no arguments state them.

Random states are numbered by rank, ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``. Without them, the rows
of the embedding are one chunk for each TP rank, and an optimizer in buffers has a group for each
pair of TP and PP ranks, ``optimizer.distributed.dp_group_idx_{group}``.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1
``core/optimizer/distrib_optimizer.py``; verl 1dda039b
``utils/checkpoint/megatron_checkpoint_manager.py``.
"""

from __future__ import annotations

import re

from core.catalog.catalog import Catalog
from core.megatron.extras.common_state import RNG, sharded_object

_EMBEDDING = "embedding.word_embeddings.weight"
_GROUP = re.compile(r"(?:^|\.)dp_group_idx_(\d+)\.")


def read_saved_sizes(catalog: Catalog) -> dict[str, int]:
    """Return the arguments for TP and PP; {} if nothing in the checkpoint shows them."""
    for key in catalog.objects:
        shard = sharded_object(key)
        if shard is not None and shard[0] == RNG and len(shard[2]) > 1:
            return _arguments(tp=shard[2][1], pp=shard[2][0])
    embedding = next((key for key in catalog.tensors if key.endswith(_EMBEDDING)), None)
    if embedding is None:
        return {}
    tp = len({fragment.box.offset[0] for fragment in catalog.fragments(embedding)})
    groups = [
        int(match[1])
        for key in (*catalog.tensors, *catalog.objects)
        if (match := _GROUP.search(key)) is not None
    ]
    n_pairs = max(groups, default=tp - 1) + 1
    return {} if n_pairs % tp else _arguments(tp=tp, pp=n_pairs // tp)


def _arguments(*, tp: int, pp: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
