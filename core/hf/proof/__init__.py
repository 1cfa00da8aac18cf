"""Proves that tensors are those of the model that a ``config.json`` describes.

Start at ``proof.check_model``, which conversions ask; ``comparison`` is what ``ckpt validate`` reports. ``expected``
makes names and shapes of a known family, ``common_sizes`` checks what every configuration states, ``quantization``
knows the methods.
Imports: arrays, catalog, changes, errors, hf.
"""
