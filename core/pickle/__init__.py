"""Pickles as inert trees, and back. Nothing that a file names is ever imported or called.

Start at ``reader``, which everything else uses and whose opcodes are in ``machine``; ``inert``
defines the nodes of trees. ``calls.toml`` lists what a pickle may call (``names`` judges by it);
``writer`` writes a tree.
Imports: arrays, errors.
"""
