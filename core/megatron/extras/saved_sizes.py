"""The parallel sizes of the run that saved a torch_dist checkpoint, where no arguments state them.

Random states are numbered by rank, ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``. Without them, the rows
of the embedding are one chunk for each TP rank, and an optimizer in buffers has a group for each
pair of TP and PP ranks, ``[chained_0.]optimizer.distributed.dp_group_idx_{group}``. Experts that EP
ranks distribute have an optimizer of their own, chained after it, with a group for each triple of
expert TP, EP and PP ranks; the columns of an expert's second linear are one chunk for each expert
TP rank.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1
``core/optimizer/distrib_optimizer.py``; verl 1dda039b
``utils/checkpoint/megatron_checkpoint_manager.py``.
"""

from __future__ import annotations

import re

from core.engine.catalog.catalog import Catalog
from core.megatron.extras.common_state import RNG
from core.megatron.extras.sharded_objects import sharded_object

_EMBEDDING = "embedding.word_embeddings.weight"
_EXPERT = re.compile(r"\.experts\..*linear_fc2\.weight$")
_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.")


def get_saved_sizes(catalog: Catalog) -> dict[str, int]:
    """Return the arguments for the parallel sizes; {} if nothing in the checkpoint shows them.

    Those for experts are only returned if experts have an optimizer in buffers of their own.
    """
    # Number of the chained optimizer → number of its groups.
    n_groups: dict[int, int] = {}
    for match in map(_GROUP.search, (*catalog.tensors, *catalog.objects)):
        if match is not None:
            chain = int(match[1] or 0)
            n_groups[chain] = max(n_groups.get(chain, 0), int(match[2]) + 1)

    shards = filter(None, map(sharded_object, catalog.objects))
    counts = next((counts for name, _, counts in shards if name == RNG and len(counts) > 1), None)
    embedding = next((key for key in catalog.tensors if key.endswith(_EMBEDDING)), None)
    if counts is not None:
        pp, tp = counts[:2]
    elif embedding is not None:
        tp = len({fragment.box.offset[0] for fragment in catalog.fragments(embedding)})
        pp, rest = divmod(n_groups.get(0, tp), tp)
        if rest:
            return {}
    else:
        return {}
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}

    # Experts' optimizer is the last one of the chain.
    last = max(n_groups, default=0)
    expert = next(filter(_EXPERT.search, catalog.tensors), None)
    if last and expert is not None:
        etp = len({fragment.box.offset[-1] for fragment in catalog.fragments(expert)})
        ep, rest = divmod(n_groups[last], etp * pp)
        if not rest:
            sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    return sizes
