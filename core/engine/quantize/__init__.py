"""Recognise quantized weights, quantize to float8, and dequantize float8 and int8, as encodings.

Start at ``to_float8`` and ``from_float8``; ``from_blockwise`` is
for optimizer states; ``schemes`` reads ``schemes.toml``, the rules
for GPTQ, AWQ and others. ``core.engine.changes.quantize`` applies them to a catalog.
"""
