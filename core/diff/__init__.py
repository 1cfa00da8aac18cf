"""``ckpt diff``: two checkpoints under the same names, compared band by band.

Start at ``run``; ``sides`` brings both to one form, ``tensor_pass`` compares, ``entries`` is for what is no tensor,
``result`` is what comes out.
Imports: inspect, checks, convert, and all below.
"""
