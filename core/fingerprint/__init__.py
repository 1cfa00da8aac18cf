"""fp1, the fingerprint of a tensor that is the same in every format and layout: its definition and arithmetic.

Start at ``definition``; ``kernel`` computes it in numpy, torch or on a device, ``sums`` adds up the parts.
``core.manifest`` makes fingerprints of checkpoints.
Imports: arrays, device, errors.
"""
