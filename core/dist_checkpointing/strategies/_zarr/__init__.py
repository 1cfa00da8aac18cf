"""Behind ``strategies.zarr``: arrays, shards, checkpoints.

Start at ``checkpoints``.
Imports: the documented modules, and all of core below.
"""
