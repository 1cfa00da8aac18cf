"""``ckpt diff``: bring two checkpoints under the same names, and compare them band by band.

Start at ``run``; ``sides`` brings both to one form, ``tensor_pass`` compares tensors, ``entries``
everything else, ``result`` holds the outcome.
Imports: arrays, catalog, changes, convert, errors, files, fingerprint, formats.huggingface,
formats.torch, hf, inspect, manifest, megatron.extras, megatron.model, megatron.optimizer,
megatron.placement, megatron.reshard, numbers, opening, pickle, plan, scan, team.
"""

from core.verb_module import make_callable

make_callable(__name__)
