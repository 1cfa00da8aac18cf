"""Saves behind the training step: writers that are forked, or kept.

Start at ``request`` and ``caller``; ``staging`` holds the memory that a writer sees.
Imports: the documented modules, and all of core below.
"""
