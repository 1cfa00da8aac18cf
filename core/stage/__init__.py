"""A destination appears complete or not at all: stages, journals, locks, replacement.

Start at ``stage``, which draws what lies on disk at each step. ``journal`` is what ``--resume``
continues from, ``replacement`` what ``--force`` does. The next run removes what a crash left
(``Stage._begin``, ``stale``).
Imports: copy, errors, files, formats, manifest, opening, plan.
"""
