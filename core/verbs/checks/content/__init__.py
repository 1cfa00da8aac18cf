"""CK7xx, CK8xx, CK607: CRCs, values, replicas, manifests, stores, fingerprints, other files.

All data is read in one scan (``--deep``). Start at ``values``; the function ``watch`` of a module
returns its needs from the scan, in addition to checksums.
"""
