"""Carry the vision and audio towers of composite models between Hugging Face and Megatron.

Start with ``models.toml``, the table of the models; ``core.hf.towers.models`` reads it,
``to_megatron`` and ``to_hf`` apply it. The text model beside the towers is one of a family
(``core.hf.text_model``).
"""
