"""Convert between ``config.json`` and Megatron's training arguments.

Start at ``config``, which converts all of a family's values; ``experts``, ``rope`` and ``yarn`` do
the parts that take more than a name. ``origin`` keeps what the arguments cannot express.
"""
