"""Threads that stop together, and ranks that do one job together.

Start at ``protocol``, the interface between the engine and a team of processes (implemented by
``ckpt_cli.workers.torch_team`` with torch's process groups). ``threads`` is for one process.
"""
