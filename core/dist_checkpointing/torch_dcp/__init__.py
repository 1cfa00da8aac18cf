"""Plans and metadata of ``torch.distributed.checkpoint`` for the storage reader and writer.

Start at ``planned_save``; ``planned_files`` writes a rank's part of it, and ``running_save`` the
rest; ``torch_metadata`` turns ``.metadata`` into torch's own classes and back.
"""
