"""Layout rules as data: how each parameter is cut over ranks.

Start at ``megatron.toml`` (QKV, gate and up, experts …), which explains its fields, then ``rules``,
which finds the rule of a parameter; ``tables`` reads that file and those of ``--rules``.
"""
