"""CK2xx–CK6xx: geometry, layout, optimizer, common state, trackers, indexes, safety.

Start at ``geometry`` and ``layout``; ``unsafe`` finds pickles that would run code when loaded.
Imports: arrays, catalog, changes, checks, checks.containers, errors, files, formats.dcp,
formats.dcp.reading, formats.huggingface, formats.mcore, formats.safetensors, formats.torch,
formats.torch.zip, formats.zarr, hf.proof, megatron.extras, megatron.model, megatron.optimizer,
megatron.optimizer.sharded, megatron.reshard, opening, pickle.
"""
