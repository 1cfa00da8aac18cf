"""Parts of ``strategies.zarr``: arrays, checkpoints.

Start at ``checkpoints``.
"""
