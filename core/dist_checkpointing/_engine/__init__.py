"""Between the documented classes and the engine: sharded tensors become catalogs of live memory.

Start at ``bridge``, the one module that knows both sides; ``prepared_save`` is a save before its bytes move.
Imports: the documented modules, and all of core below.
"""
