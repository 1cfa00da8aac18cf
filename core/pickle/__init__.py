"""Read pickles as inert trees and write them back; nothing that a file names is imported or called.

Start at ``reader``, which everything else uses and which runs the opcodes in ``machine``; ``inert``
defines the nodes of trees, and ``noted`` collects what is read. ``calls.toml`` lists what a pickle
may call (``names`` judges by it); ``writer`` writes a tree. ``fields`` checks the values of a tree,
and those of JSON and TOML.
"""
