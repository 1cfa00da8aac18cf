"""Saves in the background of training, by writer processes that are forked or persistent.

Start at ``request`` and ``caller``; ``staging`` holds the memory that a writer sees.
Imports: dist_checkpointing._ranks, errors, files.
"""
