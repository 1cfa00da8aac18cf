"""The report of ``ckpt validate``: text, JSON, JUnit, SARIF, GitHub annotations.

Start at ``verdict``, the value that is reported; the other modules are one format each.
Imports: core, screen, workers.
"""
