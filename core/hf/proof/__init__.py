"""Prove that tensors belong to the model that a ``config.json`` describes.

Start at ``proof.check_model``, which conversions call; ``comparison`` finds what ``ckpt validate``
reports. ``expected`` derives names and shapes for a known family, ``any_family`` compares what most
configurations contain, and ``quantization`` recognises quantized weights.
"""
