"""Threads that stop together, and ranks that do one job together.

Start at ``protocol``: what the engine asks of a team (the process groups of torch are behind it, in
``ckpt_cli.workers.torch_team``). ``threads`` is for one process.
Imports: errors, files.
"""
