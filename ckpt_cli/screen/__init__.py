"""Terminals, blocks of text, report files, and errors as users see them.

Start at ``terminal`` and ``blocks``; ``failure`` maps an exception to a line and an exit code.
"""
