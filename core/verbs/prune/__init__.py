"""``ckpt prune``: remove iterations of a training root that are not needed any more.

Start at ``run``. ``root`` and ``contents`` look at what is there, ``decision`` is pure and chooses
what stays, ``removal`` removes in such an order that half of an iteration is never taken for one.
"""
