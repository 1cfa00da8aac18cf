"""Saves in the background of training: by processes, forked or persistent, or by threads.

Start at ``request`` and ``caller``; ``staging`` holds the memory that a writer sees.
"""
