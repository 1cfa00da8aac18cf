"""The zip container of ``torch.save``: read, and laid out byte by byte before it is written.

Start at ``container`` for reading and ``tree_layout`` for writing; ``tree_layouts`` lays out
many state dicts that are alike.
"""
