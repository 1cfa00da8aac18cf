"""Changes to a catalog that move no data: choose, cast, rename, tie, restack, quantize.

Start at ``select``; each other module is one option of ``ckpt convert``.
``core.verbs.convert.apply_changes`` applies them in their order.
"""
