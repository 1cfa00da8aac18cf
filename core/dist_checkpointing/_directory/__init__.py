"""The directory of a save: its publication, removal of entries, and refusal of other directories.

Start at ``publication``; ``strictness`` defines the reactions to keys that do not match.
Imports: dist_checkpointing, errors, files, formats.dcp, formats.mcore, manifest, opening, stage.
"""
