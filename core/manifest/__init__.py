"""Manifests of checkpoints (sizes, CRCs, digests, fingerprints), made by reading or while copying.

Start at ``file``, the format of a manifest. ``inventory`` is ``ckpt manifest``; ``of_copy`` and
``fingerprint_copy`` spare a conversion a second read; ``lookup`` finds a manifest again.
Imports: arrays, calibration, catalog, copy, core, device, errors, files, fingerprint, formats,
formats.dcp, formats.torch, formats.torch.zip, megatron.reshard, opening, plan, scan, team.
"""
