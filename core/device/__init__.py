"""One accelerator, and one thread's way to it: streams, pinned buffers, casts and comparisons on the card.

Start at ``device``, which says what kinds of work there are; ``lane`` moves the bytes. ``core.calibration`` decides
what a device may do.
Imports: arrays, errors.
"""
