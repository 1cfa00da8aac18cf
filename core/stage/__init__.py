"""A destination appears complete or not at all: stages, journals, locks, replacement.

Start at ``stage``, which draws what lies on disk at each step; ``journal`` is what ``--resume`` goes by,
``replacement`` what ``--force`` does, ``stale`` what a crash leaves.
Imports: manifest, and all below.
"""
