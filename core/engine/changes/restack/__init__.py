"""Stack the layers' tensors along a new axis, or unstack them.

Start at ``stack``, which shows both; ``unstack`` is the other direction, and ``layer_keys`` has the
keys that they go by.
"""
