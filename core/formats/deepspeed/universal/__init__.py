"""DeepSpeed's universal checkpoint, read and written: one directory per parameter.

Start at ``format``; ``write`` describes the files.
"""
