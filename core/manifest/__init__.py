"""Manifests of checkpoints: sizes, CRCs, digests and fingerprints, from a read or a copy.

Start at ``file``, the format of a manifest. ``inventory`` implements ``ckpt manifest``; ``of_copy``
and ``fingerprint_copy`` compute a manifest while a conversion copies, without a second read;
``lookup`` finds the manifest of a checkpoint.
Imports: arrays, calibration, catalog, copy, core, device, errors, files, fingerprint, formats,
formats.dcp.reading, formats.torch, formats.torch.zip, megatron.reshard, opening, plan, scan, team.
"""
