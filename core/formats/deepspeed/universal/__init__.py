"""DeepSpeed's universal checkpoint, read and written: one directory per parameter.

Start at ``format``; ``source`` prepares a source for writing, ``write`` describes the files.
"""
