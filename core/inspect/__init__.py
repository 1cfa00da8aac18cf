"""``ckpt inspect``: the summary, the folded tree, single tensors, statistics, possible conversions.

Start at ``summary``; ``select`` finds what a KEY means, ``stats`` reads tensors, ``capabilities``
plans each conversion to find out whether it would succeed.
Imports: arrays, catalog, changes, convert, convert.global_form, errors, files, formats,
formats.torch, formats.torch_sharded, hf, megatron.model, megatron.optimizer, megatron.reshard,
megatron.rules, numbers, opening, pickle, plan, quantize, team.
"""

from core.verb_module import make_callable

make_callable(__name__)
