"""The verb: rank files, torch_dist and the global per-layer form, from any of them to any other.

Start at ``reshard``, the face of the package. ``from_ranks`` and ``from_global`` make the global form, ``to_ranks`` and
``to_torch_dist`` leave it; ``problems`` is for ``validate``, which goes on where these stop.
Imports: all of megatron, and what it may.
"""
