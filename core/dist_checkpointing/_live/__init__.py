"""The memory of a running process as a format: load a checkpoint into it, save out of it.

Start at ``load`` and ``save``; ``tensors`` builds the catalog of tensors in memory; ``destination``
says how directories and object stores are written.
"""
