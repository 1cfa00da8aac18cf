"""DeepSpeed's ZeRO 0 to 3, read only: partitions of flat buffers in rank files.

Start at ``format``, then ``partition`` (where each part of a parameter is stored) and ``runs``.
``model_parallel`` joins pipeline stages and tensor-parallel ranks, ``universal`` is the format that
DeepSpeed converts to.
"""
