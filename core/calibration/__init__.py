"""Which kinds of work a device does: those it does bit for bit as the processor, and, with ``auto``, faster.

Start at ``choice``; ``trials`` makes the samples that prove it.
Imports: arrays, catalog, device, errors, files, fingerprint, numbers, quantize, team.
"""
