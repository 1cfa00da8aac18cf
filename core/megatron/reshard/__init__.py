"""The verb: rank files, torch_dist and the global per-layer form, from any of them to any other.

Start at ``reshard``, the face of the package. ``from_ranks`` and ``from_global`` make the global
form, ``to_ranks`` and ``to_torch_dist`` leave it; ``problems`` is for ``validate``, which goes on
where these stop.
Imports: arrays, catalog, changes, errors, files, megatron.extras, megatron.model,
megatron.optimizer, megatron.optimizer.flat, megatron.optimizer.numbered,
megatron.optimizer.sharded, megatron.placement, megatron.rules, pickle.
"""
