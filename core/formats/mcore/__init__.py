"""Files and objects in Megatron-core's distributed checkpoints, whatever backend wrote the tensors.

Start at ``metadata_json``, the file that names backend and version; ``common_state`` reads
common.pt, ``objects`` the keys of ShardedObjects.
Imports: catalog, errors, files, formats.torch, pickle.
"""
