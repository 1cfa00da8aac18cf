"""CK7xx and CK8xx: CRCs, values, replicas, manifests, fingerprints; all of one scan (``--deep``).

Start at ``values``; each module says in ``watch`` what it wants to see of the scan.
Imports: the modules of checks, and what they may.
"""
