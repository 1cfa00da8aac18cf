"""The checks of ``ckpt validate``: a table of functions with stable codes.

A check is a function from a ``Subject`` to findings, defined in a module of this package or of a
package below; ``registry`` collects the ``CHECKS`` of all modules, and ``codes.toml`` has the
codes. Checks continue after a finding, and never raise because of the content of a file.

Codes are stable: a code never changes its meaning, and a retired code is not reused.

======  ==============================================================================
CK1xx   files and containers: missing, extra, truncated, broken zips, headers, chunks
CK2xx   metadata: chunks that do not tile their tensor, dtype and shape mismatches
CK3xx   layout: ranks, replicas, layers, tied copies, padded rows
CK4xx   optimizer
CK5xx   common state, tracker, indexes
CK6xx   safety: what pickles name or call, links that lead outside
CK7xx   content, with ``--deep``: CRCs, NaN, constant tensors, replicas
CK8xx   manifests, integrity.json, fingerprints
CK9xx   ``--plan-for``
======  ==============================================================================
"""
