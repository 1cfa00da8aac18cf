"""DeepSpeed's pipeline stages and tensor-parallel ranks, joined as the checkpoint itself says how.

Start at ``read``, then ``rules`` (what the checkpoint says) and ``join`` (the tensors).
"""
