"""Optimizers whose states are numbered, in model_optim_rng.pt: FP32 and Float16, alone or chained.

Start at ``content``, what the entry looks like; ``read`` and ``write`` go from it to global names
and back.
Imports: catalog, errors, files, megatron.extras, megatron.model, megatron.optimizer,
    megatron.rules, pickle.
"""
