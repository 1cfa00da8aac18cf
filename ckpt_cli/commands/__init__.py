"""One module a command: parse, one call of ``core``, one page.

Start at ``validate`` or ``transfer`` (what convert and reshard share).
Imports: core, findings, host, options, pages, screen, workers.
"""
