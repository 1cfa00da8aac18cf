"""What ranks tell each other: who saves what, and whether the shards make wholes.

Start at ``shard_distribution`` and ``integrity``; ``comm`` wraps torch.distributed.
Imports: the documented modules, and all of core below.
"""
