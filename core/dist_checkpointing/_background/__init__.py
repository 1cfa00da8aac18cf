"""Saves behind the training step: writers that are forked, or kept.

Start at ``request`` and ``caller``; ``staging`` holds the memory that a writer sees.
Imports: dist_checkpointing._ranks, errors, files.
"""
