"""``ckpt diff``: give the tensors of two checkpoints the same names, and compare them band by band.

Start at ``run``; ``sides`` converts both to one form, ``tensor_pass`` compares the tensors,
``entries`` everything else and ``places`` the keys that lead to both; ``result`` defines the
result.
"""
