"""Runs a plan: reads, casts and writes the bytes, in threads, with checksums, in bounded memory.

Start at ``run.execute`` and its ``options``; ``worker`` is what one thread does, ``output`` the files that are written,
``interleave`` the strided copies, ``ledger`` what is done when files are full.
Imports: arrays, calibration, catalog, device, errors, files, plan, team.
"""
