"""The source of a job as global tensors under their final names: the first half of prepare.

Start at ``build``, whose picture shows the paths. ``request`` reads what decides on the path and
``refusals`` checks it; ``unsharded`` makes a Megatron source global. Each path ends in a module:
``own_names``, ``as_megatron`` or ``as_hf``; ``steps`` are what they share.
Imports: catalog, changes, convert, convert.report, errors, files, formats, formats.huggingface,
formats.torch, formats.trainer, hf, hf.adapters, hf.torchtitan, megatron.extras, megatron.model,
megatron.optimizer, megatron.optimizer.sharded, megatron.placement, megatron.reshard,
megatron.rules, merge, opening.
"""
