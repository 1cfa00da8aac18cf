"""The options of each command, each declared once, and the parsers of their values.

Start at ``transfer`` (convert and reshard) and ``values``; ``short_help`` is what help shows.
Imports: core, host, screen.
"""
