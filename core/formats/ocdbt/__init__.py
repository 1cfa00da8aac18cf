"""Orbax: an OCDBT database as a directory, and the zarr arrays in it.

Start at ``format``; ``database`` and ``nodes`` read the B+ tree, ``arrays`` the zarr arrays in its
values.
Imports: arrays, catalog, errors, files, formats, formats.zarr, pickle.
"""
