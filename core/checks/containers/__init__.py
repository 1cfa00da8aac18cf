"""CK1xx (and CK207 to CK209, items): files and containers: missing, extra, cut short, broken zips, headers, chunks.

Start at ``files``, which is for every format; the others are for one container each.
Imports: catalog, checks, errors, files, formats.dcp, formats.deepspeed, formats.deepspeed.universal, formats.mcore,
formats.megatron, formats.safetensors, formats.torch, formats.torch.zip, formats.zarr, megatron.model, opening, pickle,
stage.
"""
