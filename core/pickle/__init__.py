"""Pickles as inert trees, and back. Nothing that a file names is ever imported or called.

Start at ``reader``, the authority for everything, whose opcodes are in ``machine``; ``inert`` is what trees are made
of. ``calls.toml`` lists what a pickle may call (``names`` judges by it); ``writer`` writes a tree.
Imports: arrays, errors.
"""
