"""Ranges of remote objects in memory: how much of it they take, pages to read again, read-ahead.

Start at ``memory``; ``core.files.remote_store`` puts the three together.
"""
