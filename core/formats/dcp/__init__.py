"""PyTorch's distributed checkpoint (DCP) and its dialect torch_dist, written by Megatron.

Start at ``format`` and ``torch_dist``. ``metadata`` reads ``.metadata`` into the columns of
``columns``; ``items`` lays out ``.distcp`` files; ``zstd_streams`` and ``safetensors_items`` handle
the other encodings that torch has written.
"""
