"""Optimizers whose states are numbered, in model_optim_rng.pt: FP32 and Float16, alone or chained.

Start at ``content``, the structure of the entry; ``read`` converts it to global names, and
``write`` global names to it. ``layer_wise`` deals the parameters of an optimizer that is
distributed by layers.
"""
