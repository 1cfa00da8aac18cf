"""safetensors: single files, sharded directories, and the tensor pieces that PyTorch DCP writes.

Start at ``format``; ``header`` reads and checks a header, ``layout`` lays a file out.
"""
