"""``ckpt validate``: runs the checks of a level and collects their findings.

Start at ``run``; ``accepted`` is for ``--ignore`` and baselines, ``newest`` for ``--newest-valid``.
"""
