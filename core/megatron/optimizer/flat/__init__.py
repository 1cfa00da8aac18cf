"""The distributed optimizer of rank files: flat buffers in distrib_optim.pt.

Start at ``content``, the structure of the file, and ``buffers``, the offsets of parameters in a
buffer. ``layout`` finds and proves the offsets in a stored file; ``read`` and ``write`` use them.
"""
