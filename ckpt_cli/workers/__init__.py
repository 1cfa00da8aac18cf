"""A team of processes over torch.distributed: rendezvous, store, heartbeats, progress.

Start at ``current_team``, which every command uses, and ``torch_team``.
"""
