"""The directory of a save: how it is published and removed, and what is refused.

Start at ``publication``; ``strictness`` says what mismatched keys mean.
Imports: dist_checkpointing, errors, files, formats.dcp, formats.mcore, manifest, opening, stage.
"""
