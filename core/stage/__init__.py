"""A destination appears complete or not at all: stages, journals, locks, replacement.

Start at ``stage``, which draws what lies on disk at each step; ``journal`` is what ``--resume`` goes by,
``replacement`` what ``--force`` does. What a crash leaves, the next run removes (``Stage._begin``, ``stale``).
Imports: copy, errors, files, formats, manifest, opening, plan.
"""
