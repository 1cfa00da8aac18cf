"""What lies around the weights of a Hugging Face directory, and directories of pytorch_model.bin.

Start at ``files`` (configuration, tokenizer, licence: carried as they are) and ``index`` (which
shard holds which tensor).
Imports: catalog, errors, files, formats, formats.torch, pickle.
"""
