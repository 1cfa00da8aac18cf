"""Files of ``torch.save`` (zips, and streams from before torch 1.6), and other pickles.

Start at ``format``, then ``tree`` (from a file to its tree and arrays) and ``zip``.
``weights_only`` knows which objects torch.load refuses; ``side_file`` stores the
objects of checkpoints in formats that hold only tensors.
"""
