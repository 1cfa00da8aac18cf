"""Positions and names of tensors in rank files and in torch_dist.

Start at ``homes`` (which chunk of which stage) and ``chunk`` (names in one rank's file).
``origins`` and ``joined`` are for stacked and fused keys; ``implementation`` translates between
Transformer Engine's and local names; ``qkv_order`` is for old checkpoints.
"""
