"""What both backends of Megatron-core keep beside the tensors: common.pt, metadata.json, sharded
objects.

Start at ``metadata_json``, which names the backend and version.
Imports: catalog, errors, files, formats.torch, pickle.
"""
