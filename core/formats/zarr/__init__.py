"""zarr 2 and 3 in directories, Megatron's old zarr backend among them: metadata, grids, chunks,
shards, decoding.

Start at ``format`` (zarr 2, Megatron) and ``format3``. ``array`` is one array; ``grid`` its
geometry; ``chunks`` and ``shards`` its bytes; ``fill`` what absent chunks mean.
Imports: arrays, catalog, errors, files, formats, formats.mcore, formats.torch, pickle.
"""
