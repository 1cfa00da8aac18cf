"""The report of ``ckpt validate``: text, JSON, JUnit, SARIF, GitHub annotations.

Start at ``verdict``, the value that is reported; every format has a module of its own.
"""
