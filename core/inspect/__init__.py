"""``ckpt inspect``: the summary, the folded tree, single tensors, possible conversions.

Start at ``summary``; ``capabilities`` plans each conversion to find out whether it would succeed.
Imports: arrays, catalog, changes, convert, errors, files, formats, formats.torch, hf,
megatron.model, megatron.optimizer, megatron.reshard, opening, pickle, plan, quantize.
"""

from core.verb_module import make_callable

make_callable(__name__)
