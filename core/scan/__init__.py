"""The scan: one pass over every byte of a checkpoint, in threads and ranks, in bounded memory.

Start at ``run.scan``. ``observer`` is what takes part (values, replicas, digests), ``windows`` the
order in which bytes are read, ``sums`` what comes out.
Imports: arrays, catalog, device, errors, files, team.
"""
