"""Data of the pictures of checkpoints: who holds what, what moves, what differs.

``sizes`` adds bytes up by module, ``ranks`` by rank, ``shards`` lists the boxes of a tensor and
what moves between two layouts, ``heat`` arranges differences by layer and module. The pages of
``ckpt_cli`` draw them, in the terminal and in HTML.
"""
