"""Decide which work a device does: what it does bit for bit as the CPU, and, with ``auto``, faster.

Start at ``choice``; ``trials`` makes the samples that prove it.
"""
