"""Prove that tensors belong to the model that a ``config.json`` describes.

Start at ``proof.check_model``, which conversions call; ``comparison`` finds what ``ckpt validate``
reports. ``expected`` derives names and shapes for a known family, ``common_sizes`` checks sizes
that every configuration states, and ``quantization`` knows the quantization methods.
Imports: arrays, catalog, changes, errors, hf.
"""
