"""``ckpt explore``: a terminal explorer, the only package that imports textual.

Start at ``app``; ``source`` reads the checkpoint, in workers, and ``tensor_page`` draws a tensor.
"""
