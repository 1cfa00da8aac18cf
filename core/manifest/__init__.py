"""What is written down about a checkpoint (sizes, CRCs, digests, fingerprints), by reading it or while it is copied.

Start at ``file``, the format of a manifest. ``inventory`` is ``ckpt manifest``; ``of_copy`` and ``fingerprint_copy``
cost a conversion no second read; ``lookup`` finds a manifest again.
Imports: arrays, calibration, catalog, copy, core, device, errors, files, fingerprint, formats, formats.dcp,
formats.torch, formats.torch.zip, megatron.reshard, opening, plan, scan, team.
"""
