"""The pages that inspect, diff and transfer print: functions from values of ``core`` to lines.

Start at ``transfer`` and ``diff_page``.
Imports: core, findings, screen.
"""
