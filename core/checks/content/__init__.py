"""CK7xx, CK8xx, CK607: CRCs, values, replicas, manifests, fingerprints, other files.

In one scan (``--deep``).

Start at ``values``; the function ``watch`` of a module tells what it needs from the scan besides
checksums.
Imports: arrays, calibration, catalog, checks, device, errors, files, fingerprint, formats.zarr,
manifest, numbers, opening, quantize, scan, team.
"""
