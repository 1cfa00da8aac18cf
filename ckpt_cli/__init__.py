"""The command line of the checkpoint toolkit: ``ckpt``, or ``python -m ckpt_cli``."""
