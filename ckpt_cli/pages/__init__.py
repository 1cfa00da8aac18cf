"""The pages that commands print: functions that turn values of ``core`` into lines.

Start at ``transfer``, ``inspect_page`` and ``diff_page``.
"""
