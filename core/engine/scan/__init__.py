"""Scan a checkpoint: one pass over every byte, in threads and ranks, in bounded memory.

Start at ``run.scan``. ``observer`` defines what takes part (values, replicas, digests), ``windows``
the order in which bytes are read, ``sums`` the results.
"""
