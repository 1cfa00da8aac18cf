"""One accelerator and one thread's way to it: streams, pinned buffers, casts and comparisons on it.

Start at ``device``, which names the kinds of work; ``lane`` moves the bytes. ``core.calibration``
decides what a device may do.
Imports: arrays, errors.
"""
