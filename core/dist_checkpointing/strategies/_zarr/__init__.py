"""Parts of ``strategies.zarr``: arrays, shards, checkpoints.

Start at ``checkpoints``.
Imports: arrays, dist_checkpointing, dist_checkpointing._directory, dist_checkpointing._ranks,
dist_checkpointing.strategies, errors, files, formats.mcore, formats.zarr, manifest.
"""
