"""PyTorch's distributed checkpoint, and Megatron's torch_dist, which is a dialect of it.

Start at ``format`` and ``torch_dist``. ``metadata`` reads ``.metadata`` into the columns of
``columns``; ``items`` finds tensors in .distcp files; ``zstd_streams`` and ``safetensors_items``
are other ways that torch wrote them.
Imports: arrays, catalog, errors, files, formats, formats.mcore, formats.safetensors, formats.torch,
    pickle.
"""
