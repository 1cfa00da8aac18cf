"""The distributed optimizer of rank files: flat buffers in distrib_optim.pt.

Start at ``content``, what the file holds, and ``buffers``, where each parameter lies in a buffer.
``layout`` finds and proves that for a stored file; ``read`` and ``write`` do the rest.
Imports: arrays, catalog, errors, files, megatron.extras, megatron.model, megatron.optimizer,
    megatron.rules, pickle.
"""
