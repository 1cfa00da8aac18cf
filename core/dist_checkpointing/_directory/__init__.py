"""Where a save goes: its publication, removal of entries, and refusal of other directories.

Start at ``begin``; ``strictness`` defines the reactions to keys that do not match.
"""
