"""Threads that stop together, and ranks that do one job together.

Start at ``protocol``: what the engine asks of a team (``ckpt_cli.workers.torch_team`` implements it
with torch's process groups). ``threads`` is for one process.
Imports: errors, files.
"""
