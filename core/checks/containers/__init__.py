"""CK1xx, CK207–CK209: missing, extra and truncated files, damaged containers, chunks and items.

Start at ``files``, which applies to every format, like ``extents``; the others are for one format.
Imports: catalog, checks, errors, files, formats.dcp, formats.dcp.reading, formats.deepspeed,
formats.deepspeed.universal, formats.mcore, formats.megatron, formats.safetensors, formats.torch,
formats.torch.zip, formats.torch_sharded, formats.zarr, megatron.model, opening, pickle, stage.
"""
