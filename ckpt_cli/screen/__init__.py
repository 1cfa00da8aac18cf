"""What the output can take, text blocks, and errors as one line.

Start at ``terminal`` and ``blocks``; ``failure`` maps an exception to a line and an exit code.
Imports: core.
"""
