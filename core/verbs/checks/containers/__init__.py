"""CK1xx, CK207–CK209: missing, extra and truncated files, damaged containers, chunks and items.

Start at ``files``, which applies to every format, like ``extents``; the others are for one format.
"""
