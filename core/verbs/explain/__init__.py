"""What messages and finding codes mean: ``messages.toml``, ``causes.toml`` and their reader.

Start at ``messages``. docs/troubleshooting.md is made of the same tables.
"""
