"""Run a plan: read, cast and write the bytes, in threads, with checksums, in bounded memory.

Start at ``run.execute`` and its ``options``; ``worker`` is one thread's part, ``output`` writes the
files, ``interleave`` does the strided copies, ``ledger`` adds up checksums as files fill.
"""
