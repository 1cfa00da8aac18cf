"""The connection of the documented classes to the engine.

Start at ``bridge``, the only module that uses both sides: it turns sharded tensors into catalogs of
live memory. ``prepared_save`` is a save before any byte is written.
Imports: arrays, catalog, dist_checkpointing, dist_checkpointing._background,
dist_checkpointing._directory, dist_checkpointing._ranks, dist_checkpointing._values, errors, files,
formats, formats.mcore, formats.zarr, live, megatron.optimizer.sharded, plan.
"""
