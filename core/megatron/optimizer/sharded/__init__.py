"""The optimizer of checkpoints that hold global tensors: by parameter, or as the flat buffers of
the ranks.

Start at ``read`` and ``write``; ``buckets`` is for optimizers that load only at the sizes they were
saved with.
Imports: arrays, catalog, changes, errors, files, megatron.extras, megatron.model,
megatron.optimizer, megatron.optimizer.flat, megatron.placement, megatron.rules, pickle.
"""
