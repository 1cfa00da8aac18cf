"""Parts of ``strategies.torch``: planners, state dicts, results of writes.

Start at ``state``.
"""
