"""Behind ``strategies.torch``: keys, planners, state dicts, results of writes.

Start at ``state``.
Imports: the documented modules, and all of core below.
"""
