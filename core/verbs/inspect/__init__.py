"""``ckpt inspect``: the summary, the folded tree, single tensors, statistics, possible conversions.

Start at ``summary``; ``select`` finds what a KEY means, ``stats`` reads tensors. ``capability``
tells what a plain state dict can become; for all others ``capabilities`` plans each conversion.
"""
