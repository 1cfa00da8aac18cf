"""Write ``.metadata`` for new items, or for those of another checkpoint.

Start at ``metadata_image``; ``linked_metadata`` refers to the source's files, and ``key_paths`` has
the paths of entries, which both record.
"""
