"""The entries of a checkpoint besides its model, and what becomes of them when the layout changes.

Start at ``common_state``, the table of entries; then ``random_states``, ``extra_states``
(Transformer Engine's) and ``nested_dicts`` (models of megatron.legacy).
Imports: catalog, errors, files, megatron.model, megatron.rules, pickle.
"""
