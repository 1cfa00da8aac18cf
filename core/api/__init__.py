"""The Python interface: a checkpoint as a mapping of lazy tensors, and the verbs as functions.

Start at ``checkpoint``, what ``core.open`` returns; ``tensor`` is one lazy tensor, ``verbs`` what
``core.convert(…)`` and its like call.
Imports: arrays, catalog, changes, checks, convert, core, diff, errors, files, hf, inspect,
megatron.model, megatron.reshard, merge, numbers, opening, plan, prune, validate.
"""
