"""Plans and metadata of ``torch.distributed.checkpoint`` for the storage reader and writer.

Start at ``planned_save``; ``torch_metadata`` turns ``.metadata`` into torch's own classes and back.
"""
