"""Optimizer states under Hugging Face's names: renamed, fused and split like their parameters.

Start at ``states``, whose views let ``core.hf.to_hf`` and ``core.hf.to_megatron`` convert a state
as if it were the weights. ``groups`` converts parameter groups, ``steps`` numbers of steps,
``restored`` builds Megatron's optimizer.
Imports: arrays, catalog, errors, files, megatron.optimizer, pickle, quantize.
"""
