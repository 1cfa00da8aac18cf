"""Manifests of checkpoints: sizes, CRCs, digests and fingerprints, from a read or a copy.

Start at ``file``, the format of a manifest. ``inventory`` implements ``ckpt manifest``; ``of_copy``
and ``fingerprint_copy`` compute a manifest while a conversion copies, without a second read;
``lookup`` finds the manifest of a checkpoint.
"""
