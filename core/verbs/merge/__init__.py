"""``ckpt merge``: compute the tensors of one checkpoint from those of several, as encodings.

Start at ``request`` (what to compute) and ``merge`` (the merged catalog); ``forms`` brings the
other sources under the names of the first. ``combined``, ``slerp`` and ``lora`` are the encodings,
which define the arithmetic bit for bit; ``adapter`` folds adapters in, and ``adapter_forms`` brings
those of Megatron under peft's names.
"""
