"""CK7xx, CK8xx, CK607: CRCs, values, replicas, manifests, fingerprints, other files; one scan (``--deep``).

Start at ``values``; modules that need more than sums say in ``watch`` what they want to see of the scan.
Imports: arrays, calibration, catalog, checks, device, errors, files, fingerprint, formats.zarr, manifest, numbers,
opening, quantize, scan, team.
"""
