"""Entries of a checkpoint other than the model, and their treatment when the layout changes.

Start at ``common_state``, the table of entries; then ``random_states``, ``extra_states``
(Transformer Engine's) and ``nested_dicts`` (models of megatron.legacy).
"""
