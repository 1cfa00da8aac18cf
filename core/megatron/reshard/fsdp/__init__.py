"""Write the global per-layer form as Megatron-FSDP's ``fsdp_dtensor``.

Start at ``to_fsdp_dtensor``, which shows the form. ``checks`` refuses models and optimizers that
Megatron-FSDP does not have; ``names`` and ``tensors`` find the keys and rows of what is stored.
"""
