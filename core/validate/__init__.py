"""``ckpt validate``: runs the checks of a level and collects what they find.

Start at ``run``; ``accepted`` is for ``--ignore`` and baselines, ``newest`` for ``--newest-valid``.
Imports: checks, inspect, convert, and all below.
"""
