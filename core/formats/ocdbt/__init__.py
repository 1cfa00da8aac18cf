"""Orbax checkpoints: zarr arrays in an OCDBT database, or in separate directories.

Start at ``format``; ``database`` and ``nodes`` read the B+ tree, ``arrays`` the zarr arrays in its
values.
"""
