"""The connection of the documented classes to the engine.

Start at ``bridge``, the only module that uses both sides: it turns sharded tensors into catalogs of
live memory. ``prepared_save`` is a save before any byte is written.
"""
