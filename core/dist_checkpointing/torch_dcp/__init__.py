"""Behind ``storage_reader`` and ``storage_writer``: plans and metadata of ``torch.distributed.checkpoint``.

Start at ``planned_save``; ``torch_metadata`` turns ``.metadata`` into torch's own classes and back.
Imports: the documented modules, and all of core below.
"""
