"""The options of each command, each declared once, and the parsers of their values.

Start at ``transfer`` (convert and reshard); ``shared`` has the options that several commands share
and the parsers of values, ``short_help`` is what help shows.
"""
