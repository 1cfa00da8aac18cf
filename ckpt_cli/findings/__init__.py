"""The report of ``ckpt validate``: text, JSON, JUnit, SARIF, GitHub annotations.

Start at ``verdict``, what is reported; the others are one format each.
Imports: core, screen, workers.
"""
