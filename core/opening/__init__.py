"""From a path to a store, a format and a catalog; and the forms that a catalog takes on its way.

Start at ``open.open_checkpoint``. ``unrecognised`` says why a path is no checkpoint; ``source_files`` accounts for
every file beside the tensors; ``canonical`` is the same whatever format and layout; ``target`` cuts a catalog for a
destination.
Imports: arrays, catalog, errors, files, formats, formats.dcp, formats.deepspeed, formats.huggingface,
formats.safetensors, formats.torch, formats.zarr, megatron.extras, megatron.optimizer, megatron.reshard, pickle, plan.
"""
