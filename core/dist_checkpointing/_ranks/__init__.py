"""What ranks tell each other: who saves what, and whether the shards make wholes.

Start at ``shard_distribution`` and ``integrity``; ``comm`` wraps torch.distributed.
Imports: arrays, dist_checkpointing, dist_checkpointing._engine, errors.
"""
