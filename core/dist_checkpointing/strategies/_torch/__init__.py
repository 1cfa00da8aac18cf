"""Parts of ``strategies.torch``: keys, planners, state dicts, results of writes.

Start at ``state``.
"""
