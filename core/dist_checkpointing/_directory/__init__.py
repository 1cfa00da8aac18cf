"""Where a save goes: its publication, and removal of entries from what was saved.

Start at ``publication``, of a directory; ``bucket_publication`` is that of an object store.
"""
