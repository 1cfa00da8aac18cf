"""Plans and metadata of ``torch.distributed.checkpoint`` for the storage reader and writer.

Start at ``planned_save``; ``torch_metadata`` turns ``.metadata`` into torch's own classes and back.
Imports: arrays, catalog, convert, copy, dist_checkpointing, dist_checkpointing._directory,
dist_checkpointing._engine, errors, files, files.multipart, formats, formats.dcp,
formats.dcp.reading, formats.torch, live, manifest, opening, pickle, plan, stage.
"""
