"""Pictures in the terminal: functions that turn the data of ``core.pictures`` into lines.

Start at ``sizes``; ``bars`` has the glyphs. ``Screen.plain`` replaces them by ASCII.
Imports: core, screen.
"""
