"""LoRA adapters: from peft's directories to Megatron-Bridge's checkpoints, and back.

Start at ``linear``, which shows the names and shapes of both sides; ``peft`` reads what peft
writes, ``to_megatron`` and ``to_peft`` convert.
"""
