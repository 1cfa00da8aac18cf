"""Parts of ``strategies.zarr``: arrays, shards, checkpoints.

Start at ``checkpoints``.
"""
