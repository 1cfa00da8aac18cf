"""CK1xx: files and containers: missing, extra, cut short, broken zips, headers, chunks.

Start at ``files``, which is for every format; the others are for one container each.
Imports: the modules of checks, and what they may.
"""
