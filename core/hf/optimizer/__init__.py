"""Optimizer states under Hugging Face's names: renamed, fused and split like their parameters.

Start at ``states``, whose views let ``to_global`` and ``to_named`` convert a state as if it were
the weights. ``groups`` converts parameter groups, ``steps`` numbers of steps,
``restored`` builds Megatron's optimizer.
"""
