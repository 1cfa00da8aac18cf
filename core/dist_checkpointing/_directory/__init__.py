"""The directory of a save: how it is published and removed, and what is refused.

Start at ``publication``; ``strictness`` says what mismatched keys mean.
Imports: the documented modules, and all of core below.
"""
