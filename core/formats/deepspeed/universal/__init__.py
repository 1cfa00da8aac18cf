"""DeepSpeed's universal checkpoint, read and written: a directory a parameter.

Start at ``format``; ``source`` makes one of ZeRO files or of global tensors, ``write`` lays it out.
Imports: arrays, catalog, changes, errors, files, formats, formats.deepspeed, formats.torch, pickle.
"""
