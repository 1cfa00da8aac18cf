"""``ckpt diff``: give the tensors of two checkpoints the same names, and compare them band by band.

Start at ``run``; ``sides`` converts both to one form, ``tensor_pass`` compares the tensors and
``entries`` everything else; ``result`` defines the result.
Imports: arrays, catalog, changes, convert, core, errors, files, fingerprint, formats.huggingface,
formats.torch, hf, hf.tensors, inspect, manifest, megatron.extras, megatron.model,
megatron.optimizer, megatron.placement, megatron.reshard, numbers, opening, pickle, plan, scan,
team.
"""

from core.verb_module import make_callable

make_callable(__name__)
