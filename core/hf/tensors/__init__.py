"""Tensors of the two forms, made of each other's fragments; nothing is read or copied.

Start at ``global_tensor`` (to Megatron) and ``hf_tensor`` (to Hugging Face). ``fuse`` joins and
splits rows, ``packed`` takes experts out of tensors that hold all of a layer, ``shifted`` adds to
numbers. ``spelling`` matches the names that versions of transformers give to the same tensor.
"""
