"""Converting and resharding: the only place where format, layout, plan, copy and stage meet.

Start at ``job`` (what is asked), ``prepare`` (decides and proves, moves nothing) and ``run`` (moves
the bytes). ``global_form`` and ``target_form`` are the two halves of prepare; ``contract`` is what
a third party's format is tested by.
Imports: arrays, calibration, catalog, changes, convert.stored_plan, copy, core, device, errors,
files, fingerprint, formats, formats.dcp, formats.huggingface, formats.torch, hf, manifest,
megatron.extras, megatron.model, megatron.optimizer, megatron.optimizer.sharded, megatron.placement,
megatron.reshard, megatron.rules, opening, pickle, plan, quantize, stage, team.
"""

from core.verb_module import make_callable

make_callable(__name__)
