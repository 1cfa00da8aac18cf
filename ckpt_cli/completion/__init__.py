"""Shell completion: what the TAB key offers in bash, zsh and fish.

Start at ``answer``, which a shell's script runs; ``install`` writes that script. Only ``source``
looks at a checkpoint, in a child process with a deadline (``deadline``).
"""
