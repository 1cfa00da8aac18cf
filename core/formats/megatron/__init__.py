"""Megatron's rank files: mp_rank_*/model_optim_rng.pt, one torch file per rank.

Start at ``format``; ``ranks`` parses one of several files of equal structure, and reuses the result
for the others.
"""
