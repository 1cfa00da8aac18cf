"""float8 and int8 weights with scales, as encodings; and which tensors of other software belong to a quantized weight.

Start at ``to_float8`` and ``from_float8``; ``schemes`` reads ``schemes.toml``, the names that GPTQ, AWQ and others use.
``core.changes.quantize`` applies them to a catalog.
Imports: arrays, catalog, device, errors, files.
"""
