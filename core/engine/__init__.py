"""What moves and compares tensors; it knows no format and no model.

Start at ``catalog`` (what a checkpoint holds: a tensor and where its bytes lie). ``changes`` turn a
catalog into another, ``plan`` proves that every element of a target has one source, ``copy`` moves
the bytes and ``scan`` reads them. ``quantize`` computes tensors from others, ``fingerprint`` and
``numbers`` say what they hold, ``team`` shares work and ``device`` (``calibration``) lends an
accelerator.
"""
