"""Megatron's rank files: mp_rank_*/model_optim_rng.pt, one torch file a rank.

Start at ``format``; ``ranks`` copies what is worked out for one file to all that are alike.
Imports: catalog, errors, files, formats, formats.torch, formats.torch.zip, megatron.extras,
megatron.model, megatron.optimizer.flat, pickle.
"""
