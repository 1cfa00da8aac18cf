"""Communication between ranks, the bytes of their shards, and checks of the shards.

Start at ``shard_bytes`` and ``integrity``; ``comm`` wraps torch.distributed.
"""
