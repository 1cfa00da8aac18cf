"""The options of each command, each declared once, and the parsers of their values.

Start at ``transfer`` (convert and reshard) and ``values``; ``typer_command`` writes the help pages.
Imports: core, host.
"""
