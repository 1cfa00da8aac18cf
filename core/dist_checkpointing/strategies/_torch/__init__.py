"""Parts of ``strategies.torch``: keys, planners, state dicts, results of writes.

Start at ``state``.
Imports: dist_checkpointing, dist_checkpointing._engine, dist_checkpointing._ranks,
dist_checkpointing._values, dist_checkpointing.strategies, errors.
"""
