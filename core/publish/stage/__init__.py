"""Publish a destination complete or not at all: staging directory, journal, locks, replacement.

Start at ``stage``, which shows what is on disk at each step. ``journal`` is what ``--resume``
continues from, ``replacement`` implements ``--force``. The next run removes what a crash left
behind (``Stage._begin``, ``stale``).
"""
