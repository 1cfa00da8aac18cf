"""Pictures in the terminal: functions that turn the data of ``core.verbs.pictures`` into lines.

Start at ``sizes``; ``bars`` and ``box_drawing`` have the glyphs, ``Screen.plain`` those of ASCII.
"""
