"""Options that several commands share, and the parsers of option values.

Start at ``values``; ``progress`` and ``storage`` declare one option each.
"""
