"""The scan: one pass over every byte of a checkpoint, in several threads and ranks, in bounded memory.

Start at ``run.scan``. ``observer`` is what takes part (values, replicas, digests); ``windows`` says in which order
bytes are read; ``sums`` is what comes out.
Imports: arrays, catalog, device, errors, files, team.
"""
