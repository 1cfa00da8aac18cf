"""Optimizers in checkpoints of global tensors: states by parameter, or flat buffers of the ranks.

Start at ``read`` and ``write``; ``buckets`` reads the forms that Megatron loads only at the sizes
they were saved with.
"""
