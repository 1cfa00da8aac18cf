"""Conversion and resharding: format, layout, plan, copy and staging directory meet here only.

Start at ``job`` (the options), ``prepare`` (decides and proves, copies nothing) and ``run`` (copies
the bytes). ``global_form`` and ``target_form`` are the two halves of prepare; ``contract`` checks
a third party's format.
Imports: arrays, calibration, catalog, changes, changes.restack, convert.global_form,
convert.report, convert.stored_plan, copy, core, device, errors, files, fingerprint, formats,
formats.dcp, formats.dcp.reading, formats.dcp.writing, formats.huggingface, formats.torch,
formats.torch.zip, hf, manifest, megatron.extras, megatron.model, megatron.optimizer,
megatron.placement, megatron.reshard, megatron.reshard.fsdp, megatron.rules, merge, opening, pickle,
plan, quantize, stage, stage.bucket, team.
"""

from core.verb_module import make_callable

make_callable(__name__)
