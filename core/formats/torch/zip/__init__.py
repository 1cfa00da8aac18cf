"""The zip container of ``torch.save``: read, and laid out byte by byte before it is written.

Start at ``container`` for reading and ``layout`` for writing; ``tree_layout`` lays out a complete
state dict, ``tree_layouts`` many that are alike.
"""
