"""Between the documented classes and the engine: sharded tensors become catalogs of live memory.

Start at ``bridge``, the one module that knows both sides; ``prepared_save`` is a save before its bytes move.
Imports: arrays, catalog, dist_checkpointing, dist_checkpointing._background, dist_checkpointing._ranks,
dist_checkpointing._values, errors, files, formats, formats.mcore, formats.zarr, live, megatron.optimizer.sharded, plan.
"""
