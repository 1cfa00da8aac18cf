"""``ckpt diff``: two checkpoints under the same names, compared band by band.

Start at ``run``; ``sides`` brings both to one form, ``tensor_pass`` compares, ``entries`` is for what is no tensor,
``result`` is what comes out.
Imports: arrays, catalog, changes, convert, errors, files, fingerprint, formats.huggingface, formats.torch, hf, inspect,
manifest, megatron.extras, megatron.model, megatron.optimizer, megatron.placement, megatron.reshard, numbers, opening,
pickle, plan, scan, team.
"""
