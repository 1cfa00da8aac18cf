"""Work on an accelerator: casts, comparisons, scales, and the streams and pinned buffers for them.

Start at ``device``, which names the kinds of work; ``lane`` moves the bytes.
``core.engine.calibration`` decides which kinds of work a device does.
"""
