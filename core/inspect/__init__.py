"""``ckpt inspect``: the summary, the folded tree, single tensors, statistics, possible conversions.

Start at ``summary``; ``select`` finds what a KEY means, ``stats`` reads tensors, ``capabilities``
plans each conversion to find out whether it would succeed.
"""

from core.verb_module import make_callable

make_callable(__name__)
