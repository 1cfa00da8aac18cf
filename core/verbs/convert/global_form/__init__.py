"""The source of a job as global tensors under their final names: the first half of prepare.

Start at ``build``, whose picture shows the paths. ``request`` reads what decides on the path and
``refusals`` checks it; ``unsharded`` makes a Megatron source global. Each path ends in a module:
``own_names``, ``as_megatron`` or ``as_hf``; ``steps`` are what they share.
"""
