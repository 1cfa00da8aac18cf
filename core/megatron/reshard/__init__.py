"""Reshard: convert rank files, torch_dist and the global per-layer form into one another.

Start at ``unshard``. ``from_ranks`` and ``from_global`` build the global form; ``to_ranks`` and
``to_torch_dist`` plan a destination from it; ``problems`` reports all problems of a layout for
``validate``, where the others raise at the first.
"""
