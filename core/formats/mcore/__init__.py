"""Megatron-core's distributed checkpoints, whatever backend wrote the tensors, and its local ones.

Start at ``metadata_json``, the file that names backend and version; ``common_state`` reads
common.pt, ``objects`` the keys of ShardedObjects. ``local`` is the format of local checkpoints.
"""
