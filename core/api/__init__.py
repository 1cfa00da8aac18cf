"""The Python interface: a checkpoint as a mapping of lazy tensors, and the verbs as functions.

Start at ``checkpoint``, what ``core.open`` returns; ``tensor`` is one lazy tensor, ``verbs`` what
``core.convert(…)`` and its like call.
"""
