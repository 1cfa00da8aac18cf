"""How each parameter is cut over ranks, as data: ``megatron.toml``, which explains its fields, and
its reader.

Start at ``megatron.toml`` (QKV, gate and up, experts …), then ``rules``, which finds the rule of a
parameter; ``tables`` reads the file and those of ``--rules``.
Imports: arrays, catalog, errors, files.
"""
