"""``ckpt validate``: runs the checks of a level and collects their findings.

Start at ``run``; ``accepted`` is for ``--ignore`` and baselines, ``newest`` for ``--newest-valid``.
"""

from core.verb_module import make_callable

make_callable(__name__)
