"""Compute fp1, a fingerprint of a tensor that is the same in every format and layout.

Start at ``definition``; ``kernel`` multiplies in numpy, torch or on a device, ``sums`` adds up the
parts of a tensor. ``core.publish.manifest`` computes the fingerprints of checkpoints.
"""
