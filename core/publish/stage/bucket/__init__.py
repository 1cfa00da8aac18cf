"""Publish a destination in an object store complete or not at all.

Start at ``stage``, which shows what is in the store at each step. ``parts`` collects the bytes of
objects in any order and sends their parts; ``literals`` writes the bytes around arrays as early as
possible; ``publication`` is the record by which another run finishes a publication.
"""
