"""Communication between ranks, the distribution of shards over them, and checks of the shards.

Start at ``shard_distribution`` and ``integrity``; ``comm`` wraps torch.distributed.
"""
