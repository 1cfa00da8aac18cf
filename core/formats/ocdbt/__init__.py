"""Orbax checkpoints: zarr arrays in an OCDBT database, or in separate directories.

Start at ``format``; ``nodes`` reads the B+ tree, ``database`` the zarr arrays in its values.
"""
