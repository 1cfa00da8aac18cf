"""zarr 2 and zarr 3 checkpoints in directories, including those of Megatron's old zarr backend.

Start at ``format`` (zarr 2, Megatron) and ``format3``. ``metadata2`` and ``metadata3`` parse an
array's metadata into ``array``; ``grid`` is its geometry; ``chunks``, ``shards`` and ``decode`` are
its bytes; ``fill`` handles the chunks that are not stored.
"""
