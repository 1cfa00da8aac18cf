"""flax's msgpack files, which are read only.

Start at ``format``; ``scanner`` reads a file without the data of its arrays.
"""
