"""What inspect, diff and transfer print: functions from values of ``core`` to lines.

Start at ``transfer`` and ``diff_page``.
Imports: findings, launch, workers, options, screen, host, core.
"""
